from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.advantages import ESTIMATORS, by_turn, estimator, group_mean, grpo
from rlkit.errors import ConfigError, EnvironmentFault
from tests.builders import episode, group, turn

rewards = st.lists(st.floats(-1e300, 1e300, allow_subnormal=False), min_size=1, max_size=12)
builtin = pytest.mark.parametrize("estimate", ESTIMATORS.values(), ids=ESTIMATORS)


def test_group_mean_is_the_reward_minus_the_mean() -> None:
    np.testing.assert_allclose(group_mean(group([1, 0, 0, 1])), [0.5, -0.5, -0.5, 0.5])


def test_grpo_divides_by_the_population_deviation() -> None:
    values = np.array([3.0, 1.0, 4.0, 1.5])
    np.testing.assert_allclose(grpo(group(values.tolist())), (values - values.mean()) / values.std())


@builtin
@given(value=st.floats(-1e308, 1e308), size=st.integers(1, 20))
def test_equal_rewards_give_exactly_zero(estimate, value: float, size: int) -> None:
    assert not estimate(group([value] * size)).any()


@builtin
@given(values=rewards)
def test_advantages_are_finite_and_sum_to_zero(estimate, values: list[float]) -> None:
    advantages = estimate(group(values))
    assert np.isfinite(advantages).all()
    scale = np.abs(advantages).max(initial=0.0)
    assert abs(np.sum(advantages / max(scale, 1e-300))) <= 1e-6


@builtin
@given(values=rewards, failed=st.lists(st.integers(0, 12), max_size=4))
def test_a_failed_episode_moves_no_one_elses_advantage(estimate, values: list[float], failed: list[int]) -> None:
    mixed: list[float | None] = list(values)
    for place in sorted(failed):
        mixed.insert(min(place, len(mixed)), None)
    whole = group(mixed)
    advantages = estimate(whole)
    np.testing.assert_array_equal(advantages[whole.valid], estimate(group(values)))
    assert not advantages[~whole.valid].any()


@builtin
@given(values=st.lists(st.integers(-100, 100), min_size=2, max_size=8), data=st.data())
def test_the_order_of_the_episodes_does_not_matter(estimate, values: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(values))))
    shuffled = estimate(group([float(values[i]) for i in order]))
    np.testing.assert_allclose(shuffled, estimate(group([float(v) for v in values]))[list(order)], atol=1e-12)


def test_an_unknown_estimator_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"advantage: there is no estimator 'grop'\. Did you mean 'grpo'"):
        estimator("grop")


def test_an_estimator_is_a_function_at_an_import_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import numpy as np\ndef ones(group):\n    return np.ones(len(group.episodes))\n")
    assert estimator("mine.py:ones", base=tmp_path)(group([1, 2])).tolist() == [1, 1]


def test_one_advantage_an_episode_is_spread_over_its_turns() -> None:
    two = episode(1.0, turns=[turn([1], [2]), turn([3], [4], parent=0)])
    whole = group([1, 0])
    whole = type(whole)("env", "task", 0, (two, whole.episodes[1]))
    rows = by_turn(np.array([0.5, -0.5]), whole)
    assert [row.tolist() for row in rows] == [[0.5, 0.5], [-0.5]]


def test_a_failed_episode_is_never_trained_on_whatever_the_estimator_says() -> None:
    rows = by_turn(np.array([1.0, 1.0]), group([1.0, None]))
    assert [row.tolist() for row in rows] == [[1.0], [0.0]]


@pytest.mark.parametrize("bad", [np.array([1.0]), np.array([np.nan, 0.0]), [np.ones(3), np.ones(1)]])
def test_an_estimator_that_gives_nonsense_is_refused(bad) -> None:
    with pytest.raises(EnvironmentFault):
        by_turn(bad, group([1, 0]))
