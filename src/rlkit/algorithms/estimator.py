"""The base classes of advantage estimators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from rlkit._util.sections import NamedSection
from rlkit.algorithms.reward_scale import Values, map_rewards

if TYPE_CHECKING:
    from rlkit.types import Group

type Advantages = Values | Sequence[Values]
"""[G] float64, one for each episode; or G arrays, one advantage for each turn of the episode."""


class Estimator(NamedSection):
    """An advantage estimator: its settings are its fields, its formula is in its docstring.

    The first paragraph of the docstring is the reference of the configuration, which finds the class by its name in
    `rlkit.algorithms.estimators.ESTIMATORS`.
    """

    kind: ClassVar = "estimator"
    metric_names: ClassVar[Sequence[str]] = ()
    """Every key of `metrics`."""
    turn_settings: ClassVar[Sequence[str]] = ()
    """Fields without effect where each task has a single turn."""

    @property
    def title(self) -> str:
        """The estimator's name in messages."""
        return self.name

    @property
    def sees_steps(self) -> bool:
        """True if the advantages of a group may depend on the other groups of its step."""
        return False

    def advantages(self, group: Group) -> Advantages:
        """Return one advantage for each episode, [G] float64, or for each turn of each episode."""
        raise NotImplementedError

    def step_advantages(self, groups: Sequence[Group]) -> Sequence[Advantages]:
        """Return the advantages of the groups of one environment in a step, in their order."""
        return [self.advantages(group) for group in groups]

    def metrics(self, group: Group) -> Mapping[str, float]:
        """Return numbers about the estimate of a group, for `env/<name>/advantage/<key>`, a mean over groups."""
        return {}

    def size_problem(self, size: int) -> str | None:
        """Return why groups of this size cannot be estimated; None if they can."""
        if size < 2:
            return f"a group of 1 has no baseline, so {self.name} would train nothing; set group_size to 2 or more"
        return None

    @property
    def stream_problem(self) -> str | None:
        """The reason why the schedule `stream` cannot use the estimator; None if it can."""
        if not self.sees_steps:
            return None
        return (
            f"the estimator {self.title} needs all groups of a step at once, and with the schedule `stream` gradients "
            "are computed before they are there: set schedule.mode to sync or async, or choose another advantage"
        )


class RewardEstimator(Estimator):
    """An estimator whose advantages follow from the rewards of a group alone, by `formula`."""

    in_reward_units: ClassVar[bool] = True
    """The advantages grow with the rewards, instead of being without a unit."""

    def formula(self, r: Values) -> Values:
        """Return the advantages of a group from its rewards.

        Args:
            r: [n] rewards of the episodes that have one, not all equal, in a unit in which none is above 1.

        Returns:
            [n], in the same unit: twice the rewards give twice the advantages. If `in_reward_units` is False, the unit
            is not multiplied back, and rewards in another unit must give the same.
        """
        raise NotImplementedError

    def advantages(self, group: Group) -> Values:  # noqa: D102  inherited
        return map_rewards(group.rewards, self.formula, in_reward_units=self.in_reward_units)


class StepEstimator(Estimator):
    """An estimator that compares all groups of a step; the schedule `stream` cannot use it."""

    @property
    def sees_steps(self) -> bool:  # noqa: D102  inherited
        return True

    def advantages(self, group: Group) -> Advantages:
        """Return the advantages of a group that is the whole step."""
        return self.step_advantages([group])[0]

    def step_advantages(self, groups: Sequence[Group]) -> Sequence[Advantages]:  # noqa: D102  inherited
        raise NotImplementedError
