"""Each estimator against a plain reference that was written from the paper, and the invariances that it claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlkit.algorithms.estimators import ESTIMATORS
from rlkit.errors import EnvironmentFault
from rlkit.types import Group
from tests.builders import episode, group, turn

UNCLIPPED = 1e300
NAMES = sorted(ESTIMATORS)
EVERY = pytest.mark.parametrize("name", NAMES)
FEW = settings(max_examples=40)  # of each of so many estimators

SHIFT_INVARIANT = sorted({*NAMES} - {"maxrl", "entropic_valid_aware", "turn_returns"})
SCALE_INVARIANT = [
    "grpo", "batch_std", "reinforce_pp_baseline", "maxrl", "entropic_adaptive", "entropic_valid_aware", "quantile",
    "median_mad", "rank",
]  # fmt: skip
GROWS_WITH_REWARDS = ["group_mean", "rloo", "opo", "pkpo", "best_vs_second", "turn_returns"]
SUMS_TO_ZERO = [
    "group_mean", "grpo", "rloo", "batch_std", "reinforce_pp_baseline", "maxrl", "rank", "turn_returns"
]  # fmt: skip

# Multiples of 1/8, so that a reference in fractions has the same rewards.
eighths = st.lists(st.integers(-80, 80).map(lambda n: n / 8), min_size=2, max_size=8)
anything = st.lists(st.floats(-1.7e308, 1.7e308), max_size=12)


def estimate(name: str, played: Group) -> np.ndarray:
    """[G], as if the group were the whole step; of an advantage for each turn the first, which here is the only one."""
    advantages = ESTIMATORS[name]().advantages(played)
    return np.array([np.ravel(row)[0] for row in advantages], dtype=np.float64)


def restrict_rewards(name: str, values: Sequence[float]) -> list[float]:
    """Rewards that the estimator is defined for."""
    return [abs(value) for value in values] if name == "maxrl" else list(values)


def with_lengths(values: Sequence[float | None], lengths: Sequence[int]) -> Group:
    episodes = [
        episode(value, member=i, turns=[turn([1], [2] * length)])
        for i, (value, length) in enumerate(zip(values, lengths, strict=True))
    ]
    return Group("env", "task", 0, tuple(episodes))


def with_turns(rewards: Sequence[Sequence[float | None]], totals: Sequence[float | None] | None = None) -> Group:
    episodes = [
        replace(
            episode(sum(value or 0.0 for value in row) if totals is None else totals[i], member=i),
            turns=tuple(replace(turn([1], [2]), reward=value) for value in row),
        )
        for i, row in enumerate(rewards)
    ]
    return Group("env", "task", 0, tuple(episodes))


def make_function(name: str) -> Callable[..., object]:
    """The estimator of that name: of a group, or of the groups of a step, and of its settings."""

    def estimate(played: Group | Sequence[Group], **settings: float) -> object:
        estimator = ESTIMATORS[name](**settings)
        return estimator.advantages(played) if isinstance(played, Group) else estimator.step_advantages(played)

    return estimate


estimators = SimpleNamespace(**{name: make_function(name) for name in NAMES})


# What holds of all of them


@EVERY
@FEW
@given(value=st.floats(-1e308, 1e308), size=st.integers(0, 20))
def test_equal_rewards_give_exactly_zero(name: str, value: float, size: int) -> None:
    assert not estimate(name, group(restrict_rewards(name, [value] * size))).any()


@EVERY
@FEW
@given(value=st.floats(-1e3, 1e3), noise=st.lists(st.integers(-3, 3), min_size=2, max_size=9))
def test_rewards_that_differ_by_rounding_are_equal(name: str, value: float, noise: list[int]) -> None:
    rewards = [value + step * math.ulp(value) for step in noise]
    assume(abs(value) > 1e-300)
    assert not estimate(name, group(restrict_rewards(name, rewards))).any()


@EVERY
@FEW
@given(values=anything)
def test_advantages_of_any_rewards_are_finite(name: str, values: list[float]) -> None:
    assert np.isfinite(estimate(name, group(restrict_rewards(name, values)))).all()


@EVERY
@FEW
@given(value=st.floats(-1e300, 1e300), gaps=st.lists(st.floats(-1e-8, 1e-8), min_size=1, max_size=9))
def test_small_differences_of_large_rewards_do_not_overflow(name: str, value: float, gaps: list[float]) -> None:
    rewards = [value, *(value * (1 + gap) for gap in gaps)]
    assert np.isfinite(estimate(name, group(restrict_rewards(name, rewards)))).all()


@EVERY
@FEW
@given(values=anything, failed=st.lists(st.integers(0, 12), max_size=4))
def test_failed_episode_gets_zero_and_does_not_change_other_advantages(
    name: str, values: list[float], failed: list[int]
) -> None:
    rewards = restrict_rewards(name, values)
    mixed: list[float | None] = list(rewards)
    for place in sorted(failed):
        mixed.insert(min(place, len(mixed)), None)
    played = group(mixed)
    advantages = estimate(name, played)
    np.testing.assert_array_equal(advantages[played.valid_mask], estimate(name, group(rewards)))
    assert not advantages[~played.valid_mask].any()


@EVERY
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_counts_as_no_reward(name: str, bad: float) -> None:
    advantages = estimate(name, group([3.0, bad, 1.0, 2.0]))
    np.testing.assert_array_equal(advantages[[0, 2, 3]], estimate(name, group([3.0, 1.0, 2.0])))
    assert advantages[1] == 0


@EVERY
@FEW
@given(values=eighths, data=st.data())
def test_the_order_of_the_episodes_does_not_matter(name: str, values: list[float], data: st.DataObject) -> None:
    rewards = restrict_rewards(name, values)
    order = data.draw(st.permutations(range(len(rewards))))
    shuffled = estimate(name, group([rewards[i] for i in order]))
    np.testing.assert_allclose(shuffled, estimate(name, group(rewards))[list(order)], atol=1e-12)


@EVERY
@FEW
@given(values=eighths)
def test_higher_reward_never_has_a_lower_advantage(name: str, values: list[float]) -> None:
    rewards = sorted(restrict_rewards(name, values))
    assert (np.diff(estimate(name, group(rewards))) >= -1e-12).all()


@pytest.mark.parametrize("name", SHIFT_INVARIANT)
@FEW
@given(values=eighths, shift=st.integers(-1000, 1000))
def test_a_constant_added_to_all_rewards_changes_nothing(name: str, values: list[float], shift: int) -> None:
    shifted = estimate(name, group([value + shift for value in values]))
    np.testing.assert_allclose(shifted, estimate(name, group(values)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", SCALE_INVARIANT)
@FEW
@given(values=eighths, scale=st.sampled_from([1e-300, 1e-12, 0.3, 7.0, 1e12, 1e300]))
def test_scale_invariant_estimators_ignore_the_unit_of_rewards(name: str, values: list[float], scale: float) -> None:
    rewards = restrict_rewards(name, values)
    scaled = estimate(name, group([value * scale for value in rewards]))
    np.testing.assert_allclose(scaled, estimate(name, group(rewards)), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", GROWS_WITH_REWARDS)
@FEW
@given(values=eighths, scale=st.sampled_from([1e-300, 1e-12, 0.3, 7.0, 1e12, 1e300]))
def test_other_estimators_scale_with_the_unit_of_rewards(name: str, values: list[float], scale: float) -> None:
    scaled = estimate(name, group([value * scale for value in values]))
    np.testing.assert_allclose(scaled / scale, estimate(name, group(values)), atol=1e-9, rtol=1e-9)


def test_each_estimator_but_entropic_is_scale_invariant_or_equivariant() -> None:
    assert sorted([*SCALE_INVARIANT, *GROWS_WITH_REWARDS, "entropic"]) == NAMES


@pytest.mark.parametrize("name", SUMS_TO_ZERO)
@FEW
@given(values=st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=12))
def test_advantages_sum_to_zero(name: str, values: list[float]) -> None:
    advantages = estimate(name, group(restrict_rewards(name, values)))
    largest = np.abs(advantages).max()
    assert abs(np.sum(advantages / (largest or 1.0))) <= 1e-9


@pytest.mark.parametrize("name", ["entropic", "entropic_adaptive", "entropic_valid_aware"])
@given(values=anything)
def test_entropic_advantages_are_from_minus_one_to_the_clip(name: str, values: list[float]) -> None:
    advantages = estimate(name, group(values))
    assert ((advantages >= -1) & (advantages <= 16)).all()


@pytest.mark.parametrize("name", ["pkpo", "best_vs_second"])
@given(values=anything)
def test_pkpo_and_best_vs_second_are_never_negative(name: str, values: list[float]) -> None:
    assert (estimate(name, group(values)) >= 0).all()


# Each against a reference


def mean_of(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def without(values: Sequence[Fraction], index: int) -> list[Fraction]:
    return [value for place, value in enumerate(values) if place != index]


def slow_group_mean(r: Sequence[Fraction]) -> list[float]:
    return [float(value - mean_of(r)) for value in r]


def slow_grpo(r: Sequence[Fraction]) -> list[float]:
    return [float(value - mean_of(r)) / statistics.pstdev(map(float, r)) for value in r]


def slow_rloo(r: Sequence[Fraction]) -> list[float]:
    return [float(value - mean_of(without(r, i))) for i, value in enumerate(r)]


def slow_pkpo(r: Sequence[Fraction]) -> list[float]:
    k = min(4, len(r))
    sets = list(combinations(range(len(r)), k))
    return [
        float(sum(max(r[j] for j in s) - max(r[j] for j in s if j != i) for s in sets if i in s) / Fraction(len(sets)))
        for i in range(len(r))
    ]


def slow_best_vs_second(r: Sequence[Fraction]) -> list[float]:
    return [float(max(Fraction(0), value - max(without(r, i)))) for i, value in enumerate(r)]


def slow_quantile(r: Sequence[Fraction]) -> list[float]:
    enough = [b for b in r if sum(value <= b for value in r) >= Fraction(4, 10) * len(r)]
    return [float(value - min(enough)) / statistics.pstdev(map(float, r)) for value in r]


def slow_median_mad(r: Sequence[Fraction]) -> list[float]:
    middle = statistics.median(r)
    scale = statistics.median([abs(value - middle) for value in r])
    return [float((value - middle) / (Fraction("1.4826") * scale)) if scale else 0.0 for value in r]


def slow_rank(r: Sequence[Fraction]) -> list[float]:
    beaten = [sum(1.0 if o < value else 0.5 if o == value else 0.0 for o in without(r, i)) for i, value in enumerate(r)]
    return [wins / (len(r) - 1) - 0.5 for wins in beaten]


def slow_entropic(r: Sequence[Fraction]) -> list[float]:
    with localcontext() as context:
        context.prec = 60
        weights = [(2 * Decimal(value.numerator) / Decimal(value.denominator)).exp() for value in r]
        mean_others = [(sum(weights) - weight) / (len(r) - 1) for weight in weights]
        return [
            float(min(weight / mean_other - 1, Decimal(16)))
            for weight, mean_other in zip(weights, mean_others, strict=True)
        ]


REFERENCES: dict[str, Callable[[Sequence[Fraction]], list[float]]] = {
    "group_mean": slow_group_mean,
    "turn_returns": slow_group_mean,
    "opo": slow_group_mean,
    "grpo": slow_grpo,
    "batch_std": slow_grpo,
    "reinforce_pp_baseline": slow_grpo,
    "rloo": slow_rloo,
    "pkpo": slow_pkpo,
    "best_vs_second": slow_best_vs_second,
    "quantile": slow_quantile,
    "median_mad": slow_median_mad,
    "rank": slow_rank,
    "entropic": slow_entropic,
}
"""For groups of one turn of equal lengths, of which a step has one."""


@pytest.mark.parametrize("name", REFERENCES)
@FEW
@given(values=eighths)
def test_advantages_equal_a_slow_reference(name: str, values: list[float]) -> None:
    assume(min(values) < max(values))
    expected = REFERENCES[name]([Fraction(value) for value in values])
    np.testing.assert_allclose(estimate(name, group(values)), expected, rtol=1e-9, atol=1e-12)


@given(values=eighths)
def test_maxrl_is_relative_to_the_mean(values: list[float]) -> None:
    r = [abs(Fraction(value)) for value in values]
    assume(min(r) < max(r))
    expected = [float((value - mean_of(r)) / mean_of(r)) for value in r]
    np.testing.assert_allclose(estimate("maxrl", group([abs(value) for value in values])), expected, rtol=1e-9)


@pytest.mark.parametrize("rewards", [[1, -1], [-1, -1], [None, -1, 0]])
def test_maxrl_rejects_negative_rewards(rewards: list[float | None]) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"maxrl needs rewards that are not negative, .* env has the reward -1\.0"
    ):
        estimate("maxrl", group(rewards))


@given(values=eighths, data=st.data())
def test_opo_weighs_its_baseline_by_sampled_tokens(values: list[float], data: st.DataObject) -> None:
    assume(min(values) < max(values))
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=len(values), max_size=len(values)))
    assume(any(lengths))
    advantages = estimators.opo(with_lengths(values, lengths))
    r = [Fraction(value) for value in values]
    baseline = sum((value * length for value, length in zip(r, lengths, strict=True)), Fraction(0)) / sum(lengths)
    np.testing.assert_allclose(advantages, [float(value - baseline) for value in r], rtol=1e-9, atol=1e-12)
    assert abs(advantages @ np.array(lengths)) <= 1e-9


def test_opo_ignores_failed_episodes_and_forced_tokens() -> None:
    forced = episode(1.0, turns=[turn([1], [2, 3, 4], forced=2)])
    unforced = episode(0.0, member=1, turns=[turn([1], [2, 3, 4])])
    failed = episode(None, member=2, turns=[turn([1], [2] * 50)])
    np.testing.assert_allclose(estimators.opo(Group("env", "task", 0, (forced, unforced, failed))), [0.75, -0.25, 0])
    assert not estimators.opo(with_lengths([1, 0], [0, 0])).any()


@pytest.mark.parametrize("k", range(2, 7))
@given(values=st.lists(st.integers(-9, 9).map(float), min_size=6, max_size=6))
def test_pkpo_takes_the_best_of_any_k(k: int, values: list[float]) -> None:
    sets = list(combinations(range(6), k))
    expected = [
        sum(max(values[j] for j in s) - max(values[j] for j in s if j != i) for s in sets if i in s) / len(sets)
        for i in range(6)
    ]
    np.testing.assert_allclose(estimators.pkpo(group(values), k=k), expected, atol=1e-12)


def test_pkpo_is_the_published_value_for_successes_and_failures() -> None:
    advantages = estimators.pkpo(group([0, 0, 1, 1, 0, 0, 0, 0]), k=4)
    np.testing.assert_allclose(advantages[[2, 3]], math.comb(6, 3) / math.comb(8, 4))
    assert np.count_nonzero(advantages) == 2


@given(values=eighths)
def test_pkpo_of_all_is_best_against_second(values: list[float]) -> None:
    np.testing.assert_allclose(
        estimators.pkpo(group(values), k=len(values)), estimators.best_vs_second(group(values)), atol=1e-12
    )


def test_pkpo_can_count_the_sets_of_a_large_group() -> None:
    advantages = estimators.pkpo(group([float(i % 7) for i in range(2048)]), k=1024)
    assert np.isfinite(advantages).all()


# What they estimate, over every outcome of a policy that succeeds with probability p


def expected_gradient(function: Callable[[Group], np.ndarray], *, p: float, n: int) -> float:
    """E[Σ_i A_i · d log π(r_i)/dp] of n episodes that succeed with probability p."""
    total = 0.0
    for outcome in product([0, 1], repeat=n):
        chance = math.prod(p if success else 1 - p for success in outcome)
        scores = np.array([1 / p if success else -1 / (1 - p) for success in outcome])
        total += chance * float(function(group([float(success) for success in outcome])) @ scores)
    return total


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_rloo_is_the_gradient_of_the_mean_without_bias(p: float) -> None:
    assert expected_gradient(estimators.rloo, p=p, n=5) / 5 == pytest.approx(1)
    assert expected_gradient(estimators.group_mean, p=p, n=5) / 5 == pytest.approx(4 / 5)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_pkpo_is_the_gradient_of_the_best_of_k_without_bias(p: float, k: int) -> None:
    gradient = expected_gradient(lambda played: estimators.pkpo(played, k=k), p=p, n=5)
    assert gradient == pytest.approx(k * (1 - p) ** (k - 1))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_maxrl_is_the_gradient_of_the_likelihood_up_to_its_order(p: float) -> None:
    expected = sum((1 - p) ** (order - 1) for order in range(1, 5))
    assert expected_gradient(estimators.maxrl, p=p, n=5) / 5 == pytest.approx(expected)


@pytest.mark.parametrize(("successes", "trained"), [(1, 1.0), (4, 1.0), (5, 0.0), (7, 0.0)])
def test_quantile_trains_the_rare_outcome_only(successes: int, trained: float) -> None:
    values = np.array([1.0] * successes + [0.0] * (8 - successes))
    assert set(values[estimators.quantile(group(values.tolist()), level=0.4) != 0]) == {trained}


# Entropic weights


def weights_of(advantages: np.ndarray) -> np.ndarray:
    """softmax(βr) out of A_i = w_i / mean of the others − 1."""
    return (advantages + 1) / (advantages + len(advantages))


def divergence(weights: np.ndarray) -> float:
    return float(sum(w * math.log(w * len(weights)) for w in weights if w > 0))


@given(values=eighths, kl=st.sampled_from([0.01, math.log(2), 1.5]))
def test_adaptive_weights_are_the_softmax_that_is_so_far_from_uniform(values: list[float], kl: float) -> None:
    n, best = len(values), values.count(max(values))
    target = min(kl, 0.9 * math.log(n))
    assume(best < n and math.log(n / best) > target * 1.001)
    weights = weights_of(estimators.entropic_adaptive(group(values), kl=kl, clip=UNCLIPPED))
    assert weights.sum() == pytest.approx(1)
    assert divergence(weights) == pytest.approx(target, rel=1e-6)
    by_reward = sorted(zip(values, np.log(np.maximum(weights, 1e-300)), strict=True))
    sure = [(r, w) for r, w in by_reward if w > -15]  # what is left of smaller weights are rounding errors
    slopes = [(w2 - w1) / (r2 - r1) for (r1, w1), (r2, w2) in combinations(sure, 2) if r2 > r1]
    np.testing.assert_allclose(slopes, slopes[0] if slopes else 0.0, rtol=1e-4)


def discovered(valid: int) -> Group:
    """64 programs of which some are valid, with rewards 1/0.38088 and a little less; the others get 0."""
    spread = [0.38088 + 5e-4 * i / valid for i in range(valid)]
    return group([*(1 / bound for bound in spread), *[0.0] * (64 - valid)])


@pytest.mark.parametrize(
    ("valid", "constant", "adaptive"), [(32, 1.03, 1.06), (8, 7.6, 4.37), (1, 188.0, 27.8)], ids=str
)
def test_the_published_traps_are_those_of_a_fixed_and_of_an_adaptive_beta(
    valid: int, constant: float, adaptive: float
) -> None:
    played = discovered(valid)
    assert estimators.entropic(played, clip=UNCLIPPED)[0] == pytest.approx(constant, rel=0.02)
    assert estimators.entropic_adaptive(played, clip=UNCLIPPED)[0] == pytest.approx(adaptive, rel=0.02)


@pytest.mark.parametrize("valid", [64, 48, 32, 8])
def test_separate_validity_leaves_the_divergence_to_valid_programs(valid: int) -> None:
    played = discovered(valid)
    advantages = estimators.entropic_valid_aware(played)
    alone = estimators.entropic_adaptive(group(played.rewards[:valid].tolist()))
    np.testing.assert_array_equal(advantages[:valid], alone)
    assert (advantages[valid:] == -1).all()
    assert advantages[0] > 3 * max(advantages[valid // 2], 0.1)


def test_valid_episodes_that_cannot_be_ranked_share_what_the_invalid_ones_lose() -> None:
    np.testing.assert_allclose(estimators.entropic_valid_aware(group([2, 0, 2, 0, 0, 0])), [2, -1, 2, -1, -1, -1])
    np.testing.assert_allclose(estimators.entropic_valid_aware(group([2, 0, 0]), penalty=0.5), [1, -0.5, -0.5])
    assert estimators.entropic_valid_aware(discovered(1))[0] == 16
    assert not estimators.entropic_valid_aware(group([-1, 0, -2])).any()


def test_valid_metric_of_an_episode_decides_validity() -> None:
    played = group([-1, -2, -3, None])
    episodes = [replace(e, metrics={"valid": valid}) for e, valid in zip(played.episodes, [1, 1, 0, 1], strict=True)]
    advantages = estimators.entropic_valid_aware(replace(played, episodes=tuple(episodes)))
    np.testing.assert_array_equal(advantages[:2], estimators.entropic_adaptive(group([-1, -2])))
    assert advantages.tolist()[2:] == [-1, 0]


# The table of edge cases, row by row


@pytest.mark.parametrize("name", ["grpo", "entropic_adaptive", "quantile", "median_mad"])
def test_row_all_equal_is_zero_and_no_noise(name: str) -> None:
    for value in (0.1, 1 / 3, 2.6255, 1e12):
        assert not estimate(name, group([value] * 7)).any()
        assert not estimate(name, group([value, value * (1 + 5e-10), value])).any()


@EVERY
def test_row_a_group_of_one_is_zero(name: str) -> None:
    assert estimate(name, group([5.0])).tolist() == [0]
    assert estimate(name, group([None, 5.0])).tolist() == [0, 0]


def test_row_a_group_of_two_cannot_be_ln_2_from_uniform() -> None:
    advantages = estimators.entropic_adaptive(group([0, 1]), clip=UNCLIPPED)
    assert divergence(weights_of(advantages)) == pytest.approx(0.9 * math.log(2))
    assert estimators.entropic_adaptive(group([0, 1]))[1] == 16


def test_row_more_than_half_share_the_best_reward() -> None:
    advantages = estimators.entropic_adaptive(group([1.0] * 5 + [0.0] * 3))
    np.testing.assert_allclose(advantages, [0.75] * 5 + [-1] * 3)
    assert divergence(weights_of(advantages)) == pytest.approx(0.47, abs=0.001)
    np.testing.assert_allclose(estimators.entropic(group([1.0] * 5 + [0.0] * 3))[0], 0.59, atol=0.005)
    np.testing.assert_allclose(estimators.entropic(group([1.0] * 5 + [0.0] * 3), beta=4)[0], 0.73, atol=0.005)
    nearly = [1.0, math.nextafter(1, 2), 1.0, 1.0, math.nextafter(1, 0), 0.0, 0.0, 0.0]  # no weight on rounding
    np.testing.assert_array_equal(estimators.entropic_adaptive(group(nearly)), advantages)


def test_row_one_outlier_is_clipped() -> None:
    outlier = group([100.0] + [0.0] * 63)
    assert estimators.entropic(outlier)[0] == 16
    assert estimators.entropic_adaptive(outlier)[0] == 16
    assert estimators.entropic_adaptive(outlier, clip=UNCLIPPED)[0] == pytest.approx(27.8, rel=0.01)


@EVERY
def test_row_an_empty_group_is_empty(name: str) -> None:
    assert estimate(name, group([])).shape == (0,)
    assert estimate(name, group([None, None])).tolist() == [0, 0]


@EVERY
@pytest.mark.parametrize("scale", [1e12, 1e-12, 1e307, 1e-307])
def test_row_huge_and_tiny_scales_keep_the_order(name: str, scale: float) -> None:
    values = [0.0, scale, 3 * scale, 2 * scale]
    advantages = estimate(name, group(values))
    assert np.isfinite(advantages).all()
    assert advantages.argmax() == 2 or np.allclose(advantages, advantages[0])


@EVERY
def test_row_integers_and_truth_values_are_rewards(name: str) -> None:
    np.testing.assert_array_equal(estimate(name, group([True, False, 1])), estimate(name, group([1.0, 0.0, 1.0])))


def test_row_a_median_without_deviation_gives_zero() -> None:
    assert not estimators.median_mad(group([1, 1, 1, 0, 5])).any()


# Turns


@given(
    rows=st.lists(st.lists(st.integers(-8, 8), min_size=0, max_size=4), min_size=1, max_size=5),
    discount=st.sampled_from([Fraction(0), Fraction(1, 2), Fraction(1)]),
)
def test_turn_returns_equal_a_slow_reference(rows: list[list[int]], discount: Fraction) -> None:
    advantages = estimators.turn_returns(with_turns(rows), discount=float(discount))
    returns = [[sum(discount**s * value for s, value in enumerate(row[t:])) for t in range(len(row))] for row in rows]
    for i, row in enumerate(returns):
        baselines = [mean_of([Fraction(other[t]) for other in returns if len(other) > t]) for t in range(len(row))]
        expected = [float(value - baseline) for value, baseline in zip(row, baselines, strict=True)]
        np.testing.assert_allclose(advantages[i], expected, atol=1e-12)


def test_reward_not_assigned_to_turns_belongs_to_the_last_turn() -> None:
    advantages = estimators.turn_returns(with_turns([[None, None], [1.0, None]], totals=[3.0, 1.0]), discount=0.5)
    np.testing.assert_allclose(advantages[0], [(0.5 * 3 - 1) / 2, 3 / 2])
    np.testing.assert_allclose(advantages[1], [(1 - 0.5 * 3) / 2, -3 / 2])


def test_turn_reached_by_one_episode_has_zero_advantage() -> None:
    advantages = estimators.turn_returns(with_turns([[0.0, 2.0], [1.0], [None, None, 9.0]], totals=[2.0, 1.0, None]))
    assert [row.tolist() for row in advantages] == [[0.5, 0.0], [-0.5], [0.0, 0.0, 0.0]]


@given(
    rows=st.lists(st.lists(st.floats(-1e308, 1e308), min_size=1, max_size=4), min_size=1, max_size=4),
    totals=st.lists(st.floats(-1e308, 1e308), min_size=4, max_size=4),
)
def test_returns_of_any_scale_are_finite(rows: list[list[float]], totals: list[float]) -> None:
    assert all(np.isfinite(row).all() for row in estimators.turn_returns(with_turns(rows, totals=totals)))


# Whole steps

steps = st.lists(eighths, min_size=1, max_size=4)


@given(values=steps, failed=st.lists(st.integers(0, 3), max_size=2))
def test_step_estimators_divide_by_the_deviation_of_the_step(values: list[list[float]], failed: list[int]) -> None:
    mixed = [[*row, None] if place in failed else row for place, row in enumerate(values)]
    groups = [group(row) for row in mixed]
    centred = [[value - statistics.fmean(row) for value in row] for row in values]
    for function, scaled in (
        (estimators.batch_std, [value for row in values for value in row]),
        (estimators.reinforce_pp_baseline, [value for row in centred for value in row]),
    ):
        deviation = statistics.pstdev(scaled)
        for advantages, row, played in zip(function(groups), centred, groups, strict=True):
            expected = [value / deviation if deviation > 1e-12 else 0.0 for value in row]
            np.testing.assert_allclose(advantages[played.valid_mask], expected, atol=1e-9)
            assert not advantages[~played.valid_mask].any()


@given(values=steps, shifts=st.lists(st.integers(-100, 100), min_size=4, max_size=4))
def test_a_shift_of_a_group_does_not_move_the_reinforce_pp_baseline(
    values: list[list[float]], shifts: list[int]
) -> None:
    shifted = [group([value + shift for value in row]) for row, shift in zip(values, shifts, strict=False)]
    for with_shift, without_shift in zip(
        estimators.reinforce_pp_baseline(shifted),
        estimators.reinforce_pp_baseline([group(row) for row in values]),
        strict=True,
    ):
        np.testing.assert_allclose(with_shift, without_shift, atol=1e-9)


@pytest.mark.parametrize("function", [estimators.batch_std, estimators.reinforce_pp_baseline])
@given(values=st.lists(anything, max_size=4))
def test_steps_of_any_scale_are_finite(function, values: list[list[float]]) -> None:
    estimates = function([group(row) for row in values])
    assert [len(row) for row in estimates] == [len(row) for row in values]
    assert all(np.isfinite(row).all() for row in estimates)
    for row, advantages in zip(values, estimates, strict=True):
        if len(set(row)) <= 1:
            assert not advantages.any()
