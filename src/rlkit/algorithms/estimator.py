"""Base classes of advantage estimators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from rlkit._util.sections import NamedSection
from rlkit.algorithms.reward_scale import Values, map_rewards
from rlkit.types import Group

type Advantages = Values | Sequence[Values]
"""[G] float64, one advantage for each episode; or G arrays, one advantage for each turn of an episode."""


class Estimator(NamedSection):
    """An advantage estimator; its fields are its settings.

    `ESTIMATORS` maps names to classes. The first paragraph of a class's docstring is shown in the configuration
    reference.
    """

    kind: ClassVar = "estimator"
    metric_names: ClassVar[Sequence[str]] = ()
    """All keys of `metrics`."""
    turn_settings: ClassVar[Sequence[str]] = ()
    """Fields that have no effect on tasks with a single turn."""

    @property
    def title(self) -> str:
        """The estimator's name in messages."""
        return self.name

    @property
    def needs_whole_steps(self) -> bool:
        """True if the advantages of a group may depend on the other groups of its step."""
        return False

    def advantages(self, group: Group) -> Advantages:
        """Return one advantage for each episode, [G] float64, or for each turn of each episode."""
        raise NotImplementedError

    def step_advantages(self, groups: Sequence[Group]) -> Sequence[Advantages]:
        """Return the advantages of the groups of one environment in a step, in their order."""
        return [self.advantages(group) for group in groups]

    def metrics(self, group: Group) -> Mapping[str, float]:
        """Return metrics of a group; `env/<name>/advantage/<key>` reports their mean over groups."""
        return {}

    def size_problem(self, size: int) -> str | None:
        """Return why groups of this size cannot be estimated; None if they can."""
        if size < 2:
            return f"a group of 1 has no baseline, so {self.name} would train nothing; set group_size to 2 or more"
        return None

    @property
    def stream_problem(self) -> str | None:
        """Reason why the schedule `stream` cannot use the estimator; None if it can."""
        if not self.needs_whole_steps:
            return None
        reason = "the schedule `stream` computes gradients before a step is complete"
        fix = "set schedule.mode to sync or async, or choose another advantage"
        return f"the estimator {self.title} needs all groups of a step, and {reason}: {fix}"


class RewardEstimator(Estimator):
    """An estimator whose advantages depend only on the rewards of a group."""

    in_reward_units: ClassVar[bool] = True
    """True if the advantages scale with the rewards; False if they have no unit."""

    def formula(self, r: Values) -> Values:
        """Return the [n] advantages of the episodes that have a reward.

        If `in_reward_units` is True, the result must be proportional to a scale of the rewards, else independent of it.

        Args:
            r: [n] rewards, not all equal, scaled to [−1, 1].
        """
        raise NotImplementedError

    def advantages(self, group: Group) -> Values:  # noqa: D102  inherited
        return map_rewards(group.rewards, self.formula, in_reward_units=self.in_reward_units)


class StepEstimator(Estimator):
    """An estimator that compares all groups of a step; the schedule `stream` cannot use it."""

    @property
    def needs_whole_steps(self) -> bool:  # noqa: D102  inherited
        return True

    def advantages(self, group: Group) -> Advantages:
        """Return the advantages of a group as if it were the whole step."""
        return self.step_advantages([group])[0]

    def step_advantages(self, groups: Sequence[Group]) -> Sequence[Advantages]:  # noqa: D102  inherited
        raise NotImplementedError


class ConstantAdvantage(Estimator):
    """The same advantage for each turn: 0 if only a teacher trains it, and for conversations the weight of the turn,
    which is its reward."""

    name: ClassVar = "constant"
    value: float

    def advantages(self, group: Group) -> Advantages:  # noqa: D102  inherited
        weights = [[1.0 if turn.reward is None else turn.reward for turn in e.turns] for e in group.episodes]
        return [self.value * np.array(row, np.float64) for row in weights]
