"""Curricula: task sources that choose the next task by recent solve rates.

Invariants: the order of tasks depends only on the seed and on the sequence of draws and observations; every task can be
drawn again, whatever its solve rate; `next` always returns a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from rlkit.algorithms.reward_scale import EQUAL
from rlkit.config.schema.envs import FilterCurriculum, TargetCurriculum
from rlkit.env import Env, TaskSource, read_task_id
from rlkit.errors import UsageError
from rlkit.tasks.sources import epoch_order
from rlkit.types import Group, Json


@dataclass(eq=False)
class RatedSource[Settings: (FilterCurriculum, TargetCurriculum)](TaskSource):
    """A source that chooses tasks by their solve rates in finished groups, each an exponential moving mean.

    With s the share of a group's valid episodes whose reward is at least `solved_reward`, the rate p of a task starts
    as s, and each later group updates it to p + `newest_weight` · (s − p). A group without valid episodes is ignored.

    Raises:
        UsageError: a task has no `task_id`, or that of another task.
    """

    count_name: ClassVar[str]
    """Key of the counter in the state."""

    envs: Sequence[Env]
    settings: Settings
    _: KW_ONLY
    seed: int
    _count: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._index = dict[str, int]()
        for index, env in enumerate(self.envs):
            if (name := read_task_id(env)) is None:
                raise UsageError(f"task {index} has no task_id, which a curriculum needs to recognise its groups")
            if (other := self._index.setdefault(name, index)) != index:
                raise UsageError(f"tasks {other} and {index} have the same task_id, {name!r}: make them distinct")
        self.rates: NDArray[np.float64] = np.zeros(len(self.envs))
        """[N] from 0 to 1; 0 for tasks without a group."""
        self.groups: NDArray[np.int64] = np.zeros(len(self.envs), np.int64)
        """Number of observed groups, [N]."""

    def observe(self, group: Group) -> None:
        """Update the rate of a finished group's task; raise UsageError if the task is unknown."""
        if (index := self._index.get(group.task)) is None:
            raise UsageError(f"{group.task!r} is not a task of the curriculum: a task_id must not change")
        rewards = group.rewards[group.valid_mask]
        if not len(rewards):
            return
        solved_reward, newest_weight = self.settings.solved_reward, self.settings.newest_weight
        solved_reward -= EQUAL * abs(solved_reward)  # tolerance for rounding in sums of rewards
        share = float(np.mean(rewards >= solved_reward))
        self.rates[index] += (newest_weight if self.groups[index] else 1.0) * (share - self.rates[index])
        self.groups[index] += 1

    def metrics(self) -> dict[str, float]:
        """Return the share of observed tasks, and their mean solve rate."""
        observed = self.groups > 0
        share = {"seen": float(observed.mean())}
        return share | {"solve_rate": float(self.rates[observed].mean())} if observed.any() else share

    def state_dict(self) -> Mapping[str, Json]:
        """Return the counter, and the rate and the number of groups of each observed task."""
        observed = ((name, index) for name, index in self._index.items() if self.groups[index])
        rates: Json = {name: [float(self.rates[index]), int(self.groups[index])] for name, index in observed}
        return {self.count_name: self._count, "rates": rates}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Restore a result of `state_dict`; raise UsageError if a task no longer exists."""
        for name in (self.count_name, "rates"):
            if name not in state:
                raise UsageError(f"the state has no {name!r}: it belongs to another curriculum")
        self._count = cast("int", state[self.count_name])
        self.rates[:], self.groups[:] = 0, 0
        for name, entry in cast("Mapping[str, Json]", state["rates"]).items():
            if name not in self._index:
                raise UsageError(f"the task {name!r} no longer exists")
            index = self._index[name]
            self.rates[index], self.groups[index] = cast("tuple[float, int]", entry)


class FilterSource(RatedSource[FilterCurriculum]):
    """Draws tasks in shuffled epochs, without tasks that are too hard or too easy.

    A task is skipped if its solve rate is outside [`min_solve_rate`, `max_solve_rate`] and at least `min_groups` of its
    groups were observed. To update its rate, task i of the sequence is nevertheless drawn in each epoch e for which
    e + i is a multiple of `recheck_epochs`. So a task is drawn within `recheck_epochs` epochs, even if all are filtered
    out. Source: Bae et al., "Online Difficulty Filtering for Reasoning Oriented Reinforcement Learning", 2025
    (arXiv 2504.03380).
    """

    count_name = "passed"  # positions, over all epochs, of drawn and of skipped tasks

    def next(self) -> Env:  # noqa: D102  inherited
        rule = self.settings
        while True:
            epoch, place = divmod(self._count, len(self.envs))
            self._count += 1
            index = int(epoch_order(len(self.envs), seed=self.seed, epoch=epoch)[place])
            is_recheck = (epoch + index) % rule.recheck_epochs == 0
            rate, is_rated = self.rates[index], self.groups[index] >= rule.min_groups
            if is_recheck or not is_rated or rule.min_solve_rate <= rate <= rule.max_solve_rate:
                return self.envs[index]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the rates, and the shares of too hard and of too easy tasks."""
        is_rated = self.groups >= self.settings.min_groups
        hard = is_rated & (self.rates < self.settings.min_solve_rate)
        easy = is_rated & (self.rates > self.settings.max_solve_rate)
        return super().metrics() | {"too_hard": float(hard.mean()), "too_easy": float(easy.mean())}


class TargetSource(RatedSource[TargetCurriculum]):
    """Draws tasks independently, with weights by the distance of their solve rates from a target.

    The weight at solve rate p, target t and sharpness s is exp(−s · KL(t‖p)), with the divergence
    t ln(t/p) + (1−t) ln((1−t)/(1−p)): 1 at p = t, 0 at p = 0 and p = 1. With t = ½ and s = 2 it is 4p(1−p), the
    learnability of Rutherford et al., "No Regrets", 2024 (arXiv 2408.15099), and of Foster et al., "Learning to Reason
    at the Frontier of Learnability", 2025 (arXiv 2502.12272). As there, the share `explore_share` of the draws is
    uniform. A task without a group has the weight 1. If all weights are 0, draws are uniform.
    """

    count_name = "drawn"
    _cumulative: NDArray[np.float64] | None = None
    """Cumulative probabilities; None if a rate has changed since they were computed."""

    def next(self) -> Env:  # noqa: D102  inherited
        if self._cumulative is None:
            sums: NDArray[np.float64] = self.probabilities().cumsum()
            self._cumulative = cast("NDArray[np.float64]", sums / sums[-1])  # the last is exactly 1, above every sample
        sample = np.random.default_rng([self.seed, self._count]).random()
        self._count += 1
        return self.envs[int(self._cumulative.searchsorted(sample, side="right"))]

    def probabilities(self) -> NDArray[np.float64]:
        """Return the probability of each task in the next draw, [N] float64."""
        target, explore, rates = self.settings.target, self.settings.explore_share, self.rates
        with np.errstate(divide="ignore"):  # the weight at a rate of 0 or 1 is 0
            divergence = target * (np.log(target) - np.log(rates))
            divergence += (1 - target) * (np.log1p(-target) - np.log1p(-rates))
            weights = np.where(self.groups > 0, np.exp(-self.settings.sharpness * divergence), 1.0)
        total, uniform = weights.sum(), 1 / len(self.envs)
        return (1 - explore) * (weights / total) + explore * uniform if total else np.full(len(self.envs), uniform)

    def observe(self, group: Group) -> None:  # noqa: D102  inherited
        super().observe(group)
        self._cumulative = None

    def load_state_dict(self, state: Mapping[str, Json]) -> None:  # noqa: D102  inherited
        super().load_state_dict(state)
        self._cumulative = None

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the rates, and the effective number of tasks, 1 / Σ p² of N."""
        return super().metrics() | {"effective": float(1 / np.square(self.probabilities()).sum())}
