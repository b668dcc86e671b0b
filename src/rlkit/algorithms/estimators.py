"""The advantage estimators that have a name: from the rewards of a group to the advantages of its episodes.

Invariants of each: an episode without a finite reward gets 0 and moves no one else's advantage; equal rewards give
exactly 0, and so does an episode that has no other to be compared with; the order of the episodes does not matter;
nothing that comes out is NaN or infinite.

`rlkit.algorithms.reward_scale` says which rewards are equal. Below, r are the rewards of the n episodes of a group that
have one, and advantages are [G] float64 in the order of the episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rlkit.algorithms.entropic_temperature import LN2, adaptive, against_others
from rlkit.algorithms.reward_scale import EQUAL, Values, centred, exponent, in_unit, spread
from rlkit.errors import EnvironmentFault
from rlkit.types import Bools, Episode, Group


def group_mean(group: Group) -> Values:
    """Reward minus the group's mean, A_i = r_i − mean(r), the plain REINFORCE baseline.

    Shift invariant, sums to zero. Source: Williams 1992; without a scale as in Liu et al. 2025, Dr. GRPO
    (arXiv:2503.20783).
    """
    return _advantages(group, centred)


def grpo(group: Group) -> Values:
    """Reward standardised in its group, A_i = (r_i − mean(r)) / std(r), the population's deviation.

    Shift and scale invariant, sums to zero. Source: Shao et al. 2024, DeepSeekMath, §4.1.2 (arXiv:2402.03300).
    """
    return _advantages(group, lambda r: centred(r) / r.std(), scaled=False)


def rloo(group: Group) -> Values:
    """Reward minus the mean of the others, A_i = r_i − Σ_{j≠i} r_j / (n − 1): a baseline without bias.

    Shift invariant, sums to zero. Source: Ahmadian et al. 2024 (arXiv:2402.14740).
    """
    return _advantages(group, lambda r: centred(r) * (len(r) / (len(r) - 1)))


def opo(group: Group) -> Values:
    """Reward minus the mean weighted by length, A_i = r_i − Σ l_j r_j / Σ l_j, with l the sampled tokens.

    It is the baseline of least variance where the squared gradient of an episode grows with its length. Shift
    invariant; Σ l_i A_i = 0. Source: Hao et al. 2025 (arXiv:2505.23585).
    """
    lengths = np.array([episode.sampled_tokens for episode in group.episodes], dtype=np.float64)
    lengths = lengths[np.isfinite(group.rewards)]
    if not lengths.any():  # nothing was sampled, so there is nothing to train
        return np.zeros(len(group.episodes))
    return _advantages(group, lambda r: r - np.average(r, weights=lengths))


def maxrl(group: Group) -> Values:
    """Reward relative to the group's mean, A_i = (r_i − mean(r)) / mean(r); the rarer a success, the more it counts.

    With rewards of 0 and 1 it ascends the logarithm of the probability of success, to the order n − 1, instead of that
    probability. Scale invariant, sums to zero. Source: Tajwar et al. 2026 (arXiv:2602.02710).

    Raises:
        EnvironmentFault: a reward is negative, for which it is not defined.
    """

    least = min(group.rewards[np.isfinite(group.rewards)], default=0.0)
    if least < 0:  # equal ones too: that a group has none that differ is chance
        raise EnvironmentFault(
            f"maxrl needs rewards that are not negative, and a group of {group.env} has one of {least}: "
            "choose another advantage, shift the rewards, or leave out length_penalty"
        )
    return _advantages(group, lambda r: centred(r) / r.mean(), scaled=False)


def pkpo(group: Group, *, k: int = 4) -> Values:
    """The gradient of the best of k attempts, without bias, in the form of least variance (`sloo_minus_one`).

    A_i = Σ_{I∋i, |I|=k} (max_{j∈I} r_j − max_{j∈I∖i} r_j) / C(n, k): what the best of k would lose without episode i.
    Shift invariant, never negative. Source: Walder and Karkhanis 2025 (arXiv:2505.15201).

    Args:
        group: whose rewards may be any numbers.
        k: attempts, at least 2; all n where fewer have a reward.
    """

    def lost(r: Values) -> Values:
        n, best_of = len(r), min(k, len(r))
        # Only the best of a set is missed. Beside r_j as the second best, the others of the set are below j.
        sets = math.comb(n, best_of)
        seconds = np.array([math.comb(below, best_of - 2) / sets for below in range(n)])
        order = np.argsort(r, kind="stable")
        ascending = r[order]
        advantages = np.zeros(n)
        for place in range(best_of - 1, n):
            advantages[order[place]] = seconds[:place] @ (ascending[place] - ascending[:place])
        return advantages

    return _advantages(group, lost)


def best_vs_second(group: Group) -> Values:
    """What the best episode is ahead of the second, A_i = r_i − max_{j≠i} r_j for the best and 0 for all others.

    `pkpo` with k = n. Two that are equally good get 0. Shift invariant, never negative. Source: Tang et al. 2025
    (arXiv:2503.19595).
    """

    def lead(r: Values) -> Values:
        second, best = np.sort(r)[-2:]
        return np.where(r == best, best - second, 0.0)

    return _advantages(group, lead)


def entropic(group: Group, *, beta: float = 2.0, clip: float = 16.0) -> Values:
    """Exponential weights against those of the others, A_i = e^{βr_i} / mean_{j≠i} e^{βr_j} − 1.

    It ascends log E[e^{βr}], which prefers the chance of a great reward to a good mean. Shift invariant, at least −1;
    does not sum to zero. Source: Yuksekgonul et al. 2026, TTT-Discover (arXiv:2601.16175), with its constant β.

    Args:
        group: whose rewards are in the unit that `beta` is meant for.
        beta: β > 0, in 1/reward.
        clip: largest advantage.
    """
    unit = exponent(group.rewards[np.isfinite(group.rewards)])

    def weighed(r: Values) -> Values:
        with np.errstate(over="ignore"):
            return against_others(np.ldexp(beta * (r - r.max()), unit), clip=clip)

    return _advantages(group, weighed, scaled=False)


def entropic_adaptive(group: Group, *, kl: float = LN2, clip: float = 16.0) -> Values:
    """As `entropic`, with the β ≥ 0 at which KL(softmax(βr) ‖ uniform) = `kl`, so that rewards of any scale will do.

    Weights of n episodes cannot be further than ln n from uniform ones: small groups take 0.9 ln n where that is less.
    Where more share the best reward than `kl` allows, all weight goes to these. Shift and scale invariant, at least −1;
    does not sum to zero. Source: Yuksekgonul et al. 2026, TTT-Discover, §A.1 (arXiv:2601.16175).

    Args:
        group: whose rewards may be any numbers.
        kl: the divergence, in nats.
        clip: largest advantage.
    """
    return _advantages(group, lambda r: adaptive(r, kl=kl, clip=clip), scaled=False)


def entropic_valid_aware(group: Group, *, kl: float = LN2, penalty: float = 1.0, clip: float = 16.0) -> Values:
    """As `entropic_adaptive` among the valid episodes; each invalid one gets −`penalty`.

    Where many episodes give nothing valid, β would be spent on telling valid from invalid, and not good from better. An
    episode is invalid if its metric `valid` is 0; where it has no such metric, if its reward is not above 0. Valid
    episodes that cannot be ranked, as all are equal or there is one, share what the invalid ones lose. A group in which
    none is valid gets 0.

    With the metric, shift and scale invariant; does not sum to zero. Source: ours, over TTT-Discover's estimator.

    Args:
        group: whose episodes may have the metric `valid`.
        kl: the divergence among the valid episodes, in nats.
        penalty: c > 0.
        clip: largest advantage.
    """
    valid = valid_episodes(group)
    invalid = np.isfinite(group.rewards) & ~valid
    if not valid.any():
        return np.zeros(len(group.episodes))
    advantages = spread(group.rewards, valid, lambda r: adaptive(r, kl=kl, clip=clip), scaled=False)
    if not advantages.any():
        advantages[valid] = min(penalty * invalid.sum() / valid.sum(), clip)
    advantages[invalid] = -penalty
    return advantages


def valid_episodes(group: Group) -> Bools:
    """[G]: those with a reward that gave something valid, as `entropic_valid_aware` understands it."""
    said = np.array([_is_valid(episode) for episode in group.episodes], dtype=np.bool_)
    return np.isfinite(group.rewards) & said


def quantile(group: Group, *, quantile: float = 0.4) -> Values:
    """Deviation from a quantile, A_i = (r_i − Q(r)) / std(r), with Q the least reward that K·n do not exceed.

    With rewards of 0 and 1 only the rare outcome is trained: successes where at most 1 − K succeed, failures elsewhere.
    Shift and scale invariant; does not sum to zero. Source: Wu et al. 2025 (arXiv:2509.22611).

    Args:
        group: whose rewards may be any numbers.
        quantile: K, between 0 and 1; the baseline is the smallest reward r_b with #{j: r_j ≤ r_b} ≥ K·n.
    """

    def deviations(r: Values) -> Values:
        place = math.ceil(quantile * len(r) * (1 - 1e-9)) - 1  # K·n may come out just above a whole number
        return (r - np.sort(r)[max(place, 0)]) / r.std()

    return _advantages(group, deviations, scaled=False)


def median_mad(group: Group) -> Values:
    """Deviation from the median in robust units, A_i = (r_i − med(r)) / (1.4826 · med|r − med(r)|).

    One wild reward moves neither centre nor scale. Where more than half of the rewards are equal there is no scale, and
    all get 0, so it is not for rewards of 0 and 1. Shift and scale invariant; does not sum to zero. Source: Huber 1981,
    Robust Statistics; 1.4826 makes it the standard deviation of a normal distribution.
    """

    def robust(r: Values) -> Values:
        deviations = r - np.median(r)
        scale = 1.4826 * float(np.median(np.abs(deviations)))
        return deviations / scale if scale > 0 else np.zeros(len(r))

    return _advantages(group, robust, scaled=False)


def rank(group: Group) -> Values:
    """Place in the group, A_i = (#{j: r_j < r_i} + #{j≠i: r_j = r_i} / 2) / (n − 1) − ½: from −½ to ½.

    Invariant under whatever keeps the order of the rewards, sums to zero. Source: centred ranks as in Salimans et al.
    2017 (arXiv:1703.03864), with ties shared.
    """

    def places(r: Values) -> Values:
        ascending = np.sort(r)
        below, up_to = np.searchsorted(ascending, r, "left"), np.searchsorted(ascending, r, "right")
        return (below + up_to - 1) / (2 * (len(r) - 1)) - 0.5

    return _advantages(group, places, scaled=False)


def turn_returns(group: Group, *, discount: float = 1.0) -> list[Values]:
    """For each turn, its return minus the mean return of the same turn of the group, A_it = R_it − mean_j R_jt.

    R_it = Σ_{s≥t} γ^{s−t} r_is over the turns of episode i. What of the episode's reward its turns do not account for
    belongs to the last turn. The baseline of turn t is the mean over the episodes that have a turn t; one that alone
    got so far has nothing to be compared with there, and gets 0. Sums to zero at each turn. With γ = 1 and one turn it
    is `group_mean`. Source: returns with a baseline that depends on time, Williams 1992; Sutton and Barto 2018, §13.4.

    Args:
        group: whose turns may have rewards.
        discount: γ, from 0 to 1.

    Returns:
        for each episode, [turns] float64.
    """
    graded = np.isfinite(group.rewards)
    advantages = [np.zeros(len(episode.turns)) for episode in group.episodes]
    given = [
        turn.reward or 0.0
        for episode, valid in zip(group.episodes, graded, strict=True)
        for turn in episode.turns
        if valid
    ]
    unit = exponent(np.array([*given, *group.rewards[graded]]))
    returns = {
        index: _returns(episode, unit=unit, discount=discount)
        for index, episode in enumerate(group.episodes)
        if graded[index]
    }
    for place in range(max((len(row) for row in returns.values()), default=0)):
        there = [index for index, row in returns.items() if len(row) > place]
        values = np.array([returns[index][place] for index in there])
        compared = spread(values, np.ones(len(there), np.bool_), centred, scaled=True)
        for index, advantage in zip(there, in_unit(compared, unit), strict=True):
            advantages[index][place] = advantage
    return advantages


def batch_std(groups: Sequence[Group]) -> list[Values]:
    """Reward minus its group's mean, over the deviation of all rewards of the step, A_i = (r_i − mean(r)) / std(R).

    A group whose rewards hardly differ is not blown up as by `grpo`. Shift (of all groups) and scale invariant, sums to
    zero in each group. Source: Liu et al. 2025, "Tricks or Traps?", Lite PPO (arXiv:2508.08221).
    """
    rewards = _all_rewards(groups)
    unit = exponent(rewards)
    deviation = float(np.ldexp(rewards, -unit).std()) if len(rewards) else 0.0
    return [row / deviation if deviation else row for row in _all_centred(groups, unit)]


def reinforce_pp_baseline(groups: Sequence[Group]) -> list[Values]:
    """Reward minus its group's mean, over the deviation of these differences in the step, A_i = c_i / std(C).

    Their mean over the step is 0 as it is, each group's being 0. Scale invariant, and invariant to a shift of any
    group; sums to zero in each group, and has deviation 1 over the step. Source: Hu et al. 2025, REINFORCE++ with
    baseline (arXiv:2501.03262).
    """
    rows = _all_centred(groups, exponent(_all_rewards(groups)))
    valid = [np.isfinite(group.rewards) for group in groups]
    differences = np.concatenate([np.empty(0), *(row[own] for row, own in zip(rows, valid, strict=True))])
    unit = exponent(differences)  # small ones would vanish when squared
    deviation = math.sqrt(np.square(np.ldexp(differences, -unit)).mean()) if len(differences) else 0.0
    return [np.ldexp(row, -unit) / deviation if deviation else row for row in rows]


def _advantages(group: Group, formula: Callable[[Values], Values], *, scaled: bool = True) -> Values:
    return spread(group.rewards, np.isfinite(group.rewards), formula, scaled=scaled)


def _all_rewards(groups: Sequence[Group]) -> Values:
    """Those of all episodes that have one, group after group."""
    return np.concatenate([np.empty(0), *(group.rewards[np.isfinite(group.rewards)] for group in groups)])


def _all_centred(groups: Sequence[Group], unit: int) -> list[Values]:
    """For each group [G], its rewards minus their mean, in the unit 2^unit."""
    rows = [np.ldexp(group.rewards, -unit) for group in groups]
    return [spread(row, np.isfinite(row), centred, scaled=True) for row in rows]


def _is_valid(episode: Episode) -> bool:
    if "valid" in episode.metrics:
        return episode.metrics["valid"] != 0
    return episode.reward is not None and episode.reward > 0


def _returns(episode: Episode, *, unit: int, discount: float) -> Values:
    """[turns] discounted returns of an episode that has a reward, in the unit 2^unit."""
    rewards = np.ldexp(np.array([turn.reward or 0.0 for turn in episode.turns], dtype=np.float64), -unit)
    if not len(rewards):
        return rewards
    left = float(np.ldexp(episode.reward or 0.0, -unit)) - sum(rewards.tolist())
    if abs(left) > EQUAL:  # otherwise it is what adding up left over
        rewards[-1] += left
    returns, following = np.zeros(len(rewards)), 0.0
    for place in reversed(range(len(rewards))):
        returns[place] = following = float(rewards[place]) + discount * following
    return returns
