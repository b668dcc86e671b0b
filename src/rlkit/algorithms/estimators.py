"""Advantage estimators by name.

Invariants of every estimator:

- An episode without a finite reward gets 0, and does not change other advantages.
- Equal rewards (see `reward_scale`) give exactly 0, and so does a single reward.
- The order of the episodes does not matter; advantages are finite.

Below, r are the rewards of the n episodes of a group that have one. Advantages are [G] float64 in the order of the
episodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from rlkit.algorithms.entropic import Entropic, EntropicAdaptive, EntropicValidAware
from rlkit.algorithms.estimator import Estimator, RewardEstimator, StepEstimator
from rlkit.algorithms.reward_scale import EQUAL, Values, centre, exponent, in_unit, map_rewards
from rlkit.errors import EnvironmentFault
from rlkit.types import Episode, Group


class GroupMean(RewardEstimator):
    """Reward minus the group's mean, A_i = r_i − mean(r), the plain REINFORCE baseline.

    Shift invariant, sums to zero. Source: Williams 1992; without a scale as in Liu et al. 2025, Dr. GRPO
    (arXiv:2503.20783).
    """

    name: ClassVar = "group_mean"

    def formula(self, r: Values) -> Values:  # noqa: D102  inherited
        return centre(r)


class GRPO(RewardEstimator):
    """Reward standardised in its group, A_i = (r_i − mean(r)) / std(r), the population's deviation.

    Shift and scale invariant, sums to zero. Source: Shao et al. 2024, DeepSeekMath, §4.1.2 (arXiv:2402.03300).
    """

    name: ClassVar = "grpo"
    in_reward_units: ClassVar = False

    def formula(self, r: Values) -> Values:  # noqa: D102  inherited
        return centre(r) / r.std()


class RLOO(RewardEstimator):
    """Reward minus the mean of the others, A_i = r_i − Σ_{j≠i} r_j / (n − 1): a baseline without bias.

    Shift invariant, sums to zero. Source: Ahmadian et al. 2024 (arXiv:2402.14740).
    """

    name: ClassVar = "rloo"

    def formula(self, r: Values) -> Values:  # noqa: D102  inherited
        return centre(r) * (len(r) / (len(r) - 1))


class BatchStd(StepEstimator):
    """Reward minus its group's mean, over the deviation of all rewards of the step, A_i = (r_i − mean(r)) / std(R).

    Unlike `grpo`, it does not amplify groups whose rewards hardly differ. Shift (of all groups) and scale invariant,
    sums to zero in each group. Source: Liu et al. 2025, "Tricks or Traps?", Lite PPO (arXiv:2508.08221).
    """

    name: ClassVar = "batch_std"

    def step_advantages(self, groups: Sequence[Group]) -> list[Values]:  # noqa: D102  inherited
        rewards, rows = _centred_groups(groups)
        deviation = float(rewards.std()) if len(rewards) else 0.0
        return [row / deviation if deviation else row for row in rows]


class ReinforcePPBaseline(StepEstimator):
    """Reward minus its group's mean, over the deviation of these differences in the step, A_i = c_i / std(C).

    Scale invariant, and invariant to a shift of any group; sums to zero in each group, and has deviation 1 over the
    step. Source: Hu et al. 2025, REINFORCE++ with baseline (arXiv:2501.03262).
    """

    name: ClassVar = "reinforce_pp_baseline"

    def step_advantages(self, groups: Sequence[Group]) -> list[Values]:  # noqa: D102  inherited
        _, rows = _centred_groups(groups)
        pairs = zip(rows, groups, strict=True)
        differences = np.concatenate([np.empty(0), *(row[np.isfinite(group.rewards)] for row, group in pairs)])
        unit = exponent(differences)  # squares of small differences would underflow
        deviation = math.sqrt(np.square(np.ldexp(differences, -unit)).mean()) if len(differences) else 0.0
        return [np.ldexp(row, -unit) / deviation if deviation else row for row in rows]


class OPO(Estimator):
    """Reward minus the mean weighted by length, A_i = r_i − Σ l_j r_j / Σ l_j, with l the sampled tokens.

    This baseline has the least variance if the squared gradient of an episode grows with its length. Shift invariant;
    Σ l_i A_i = 0. Source: Hao et al. 2025 (arXiv:2505.23585).
    """

    name: ClassVar = "opo"

    def advantages(self, group: Group) -> Values:  # noqa: D102  inherited
        lengths = np.array([episode.sampled_tokens for episode in group.episodes], dtype=np.float64)
        lengths = lengths[np.isfinite(group.rewards)]
        if not lengths.any():  # no sampled token to train
            return np.zeros(len(group.episodes))
        return map_rewards(group.rewards, lambda r: r - np.average(r, weights=lengths), in_reward_units=True)


class MaxRL(RewardEstimator):
    """Reward relative to the group's mean, A_i = (r_i − mean(r)) / mean(r); rare successes count more.

    With rewards of 0 and 1 it ascends the logarithm of the probability of success, to the order n − 1, instead of that
    probability. Scale invariant, sums to zero. Negative rewards raise EnvironmentFault. Source: Tajwar et al. 2026
    (arXiv:2602.02710).
    """

    name: ClassVar = "maxrl"
    in_reward_units: ClassVar = False

    def formula(self, r: Values) -> Values:  # noqa: D102  inherited
        return centre(r) / r.mean()

    def advantages(self, group: Group) -> Values:  # noqa: D102  inherited
        lowest = min(filter(math.isfinite, group.rewards), default=0.0)
        if lowest < 0:  # also if all are equal, so that the error does not depend on chance
            problem = f"a group of {group.env} has the reward {lowest}"
            fix = "choose another advantage, shift the rewards, or leave out length_penalty"
            raise EnvironmentFault(f"maxrl needs rewards that are not negative, and {problem}: {fix}")
        return super().advantages(group)


class MedianMAD(RewardEstimator):
    """Deviation from the median in robust units, A_i = (r_i − med(r)) / (1.4826 · med|r − med(r)|).

    An outlier changes neither centre nor scale. If more than half of the rewards are equal, the scale is 0 and all get
    0, so do not use it with rewards of 0 and 1. Shift and scale invariant; does not sum to zero. Source: Huber 1981,
    Robust Statistics; 1.4826 makes it the standard deviation of a normal distribution.
    """

    name: ClassVar = "median_mad"
    in_reward_units: ClassVar = False

    def formula(self, r: Values) -> Values:  # noqa: D102  inherited
        deviations = r - np.median(r)
        scale = 1.4826 * float(np.median(np.abs(deviations)))
        return deviations / scale if scale > 0 else np.zeros(len(r))


class BestVsSecond(RewardEstimator):
    """Lead of the best episode over the second: A_i = r_i − max_{j≠i} r_j for the best, 0 for all others.

    `pkpo` with k = n. If two episodes share the best reward, all get 0. Shift invariant, never negative. Source: Tang
    et al. 2025 (arXiv:2503.19595).
    """

    name: ClassVar = "best_vs_second"

    def formula(self, r: Values) -> Values:  # noqa: D102  inherited
        second, best = np.sort(r)[-2:]
        return np.where(r == best, best - second, 0.0)


class Rank(RewardEstimator):
    """Rank in the group, A_i = (#{j: r_j < r_i} + #{j≠i: r_j = r_i} / 2) / (n − 1) − ½: from −½ to ½.

    Invariant to monotonic changes of the rewards, sums to zero. Source: centred ranks as in Salimans et al.
    2017 (arXiv:1703.03864), with ties shared.
    """

    name: ClassVar = "rank"
    in_reward_units: ClassVar = False

    def formula(self, r: Values) -> Values:  # noqa: D102  inherited
        ascending = np.sort(r)
        below, up_to = np.searchsorted(ascending, r, "left"), np.searchsorted(ascending, r, "right")
        return (below + up_to - 1) / (2 * (len(r) - 1)) - 0.5


class PKPO(RewardEstimator):
    """The gradient of the best of k attempts (PKPO).

    A_i = Σ_{I∋i, |I|=k} (max_{j∈I} r_j − max_{j∈I∖i} r_j) / C(n, k): the loss of the best of k without episode i, in
    the form of least variance (`sloo_minus_one`). If n < k, k is n. Unbiased, shift invariant, never negative.
    Source: Walder and Karkhanis 2025 (arXiv:2505.15201).
    """

    name: ClassVar = "pkpo"
    k: Annotated[int, Field(ge=2)] = 4
    """Number of attempts of which the best counts. The default is half of the default group: with k near the group's
    size only the best episode is trained. For k = 1, the plain mean, use `rloo`."""

    def formula(self, r: Values) -> Values:  # noqa: D102  inherited
        n, best_of = len(r), min(self.k, len(r))
        # Only the best of a set has a loss. With r_j as the second best, the other members of the set rank below j.
        sets = math.comb(n, best_of)
        seconds = np.array([math.comb(below, best_of - 2) / sets for below in range(n)])
        order = np.argsort(r, kind="stable")
        ascending = r[order]
        advantages = np.zeros(n)
        for place in range(best_of - 1, n):
            advantages[order[place]] = seconds[:place] @ (ascending[place] - ascending[:place])
        return advantages

    def size_problem(self, size: int) -> str | None:  # noqa: D102  inherited
        if self.k > size > 1:
            return f"pkpo cannot take the best of {self.k} in a group of {size}; lower its k"
        return super().size_problem(size)


class Quantile(RewardEstimator):
    """Deviations from a quantile instead of the mean.

    A_i = (r_i − Q(r)) / std(r), with Q the smallest reward r_b with #{j: r_j ≤ r_b} ≥ K·n, where K is `level`. With
    rewards of 0 and 1 only the rare outcome is trained: successes if at most 1 − K succeed, else failures.
    Shift and scale invariant; does not sum to zero. Source: Wu et al. 2025 (arXiv:2509.22611).
    """

    name: ClassVar = "quantile"
    in_reward_units: ClassVar = False
    level: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """Share of the group that lies at or below the baseline; the value of the paper."""

    def formula(self, r: Values) -> Values:  # noqa: D102  inherited
        place = math.ceil(self.level * len(r) * (1 - 1e-9)) - 1  # rounding may put K·n just above an integer
        return (r - sorted(r)[max(place, 0)]) / r.std()


class TurnReturns(Estimator):
    """Advantages by turn: the return of each turn minus the mean return of the same turn in the group.

    A_it = R_it − mean_j R_jt with the return R_it = Σ_{s≥t} γ^{s−t} r_is over the turns of episode i. The rest of the
    episode's reward, beyond the rewards of its turns, belongs to the last turn. The mean is over the episodes that have
    a turn t; if there is only one, it gets 0. Sums to zero at each turn. With γ = 1 and one turn it is `group_mean`.
    Source: returns with a time-dependent baseline, Williams 1992; Sutton and Barto 2018, §13.4.
    """

    name: ClassVar = "turn_returns"
    turn_settings: ClassVar = ("discount",)
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount γ for each turn until a reward; 1 keeps the episode's reward as the objective."""

    def advantages(self, group: Group) -> list[Values]:
        """Return [turns] float64 for each episode."""
        graded = np.isfinite(group.rewards)
        advantages = [np.zeros(len(episode.turns)) for episode in group.episodes]
        episodes = {place: episode for place, episode in enumerate(group.episodes) if graded[place]}
        rewards = [turn.reward or 0.0 for episode in episodes.values() for turn in episode.turns]
        unit = exponent(np.array([*rewards, *group.rewards[graded]]))
        returns = {place: self._returns(episode, unit=unit) for place, episode in episodes.items()}
        for turn in range(max((len(row) for row in returns.values()), default=0)):
            members = [place for place, row in returns.items() if len(row) > turn]
            values = np.array([returns[place][turn] for place in members])
            compared = map_rewards(values, centre, in_reward_units=True)
            for place, advantage in zip(members, in_unit(compared, unit), strict=True):
                advantages[place][turn] = advantage
        return advantages

    def _returns(self, episode: Episode, *, unit: int) -> Values:
        """Return [turns] discounted returns of an episode with a reward, in the unit 2^unit."""
        rewards = np.ldexp(np.array([turn.reward or 0.0 for turn in episode.turns], dtype=np.float64), -unit)
        if not len(rewards):
            return rewards
        remainder = float(np.ldexp(episode.reward or 0.0, -unit)) - sum(rewards.tolist())
        if abs(remainder) > EQUAL:  # else a rounding error of the sum
            rewards[-1] += remainder
        returns, following = np.zeros(len(rewards)), 0.0
        for place in reversed(range(len(rewards))):
            returns[place] = following = float(rewards[place]) + self.discount * following
        return returns


ESTIMATORS: dict[str, type[Estimator]] = {
    estimator.name: estimator
    for estimator in (
        *(GroupMean, GRPO, RLOO, BatchStd, ReinforcePPBaseline, OPO, MaxRL, MedianMAD, BestVsSecond, Rank),
        *(PKPO, Entropic, EntropicAdaptive, EntropicValidAware, Quantile, TurnReturns),
    )
}
"""Classes of the estimators by name; add a class of your own to make its name known."""


def _centred_groups(groups: Sequence[Group]) -> tuple[Values, list[Values]]:
    """Return the finite rewards of a step, and for each group [G] its rewards minus their mean, in one unit."""
    rewards = np.concatenate([np.empty(0), *(group.rewards[np.isfinite(group.rewards)] for group in groups)])
    unit = exponent(rewards)
    rows = [map_rewards(np.ldexp(group.rewards, -unit), centre, in_reward_units=True) for group in groups]
    return np.ldexp(rewards, -unit), rows
