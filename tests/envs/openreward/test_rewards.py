from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.envs.openreward.rewards import Reduction, RewardRule
from rlkit.errors import EnvironmentFault, UsageError

REDUCTIONS: list[Reduction] = ["sum", "mean", "last", "max", "min"]
reward_lists = st.lists(st.none() | st.floats(-1e6, 1e6), max_size=8)


@pytest.mark.parametrize(
    ("reduction", "reward"), [("sum", 3.0), ("mean", 1.0), ("last", 0.0), ("max", 4.0), ("min", -1.0)]
)
def test_rewards_are_reduced_in_order(reduction: Reduction, reward: float) -> None:
    assert RewardRule(reduction).compute([None, 4.0, -1.0, 0.0, None], finished=True) == reward


@given(rewards=reward_lists, reduction=st.sampled_from(REDUCTIONS))
def test_a_call_without_a_reward_changes_nothing(rewards: list[float | None], reduction: Reduction) -> None:
    known_rewards: list[float | None] = [reward for reward in rewards if reward is not None]
    rule = RewardRule(reduction)
    assert rule.compute(rewards, finished=False) == rule.compute(known_rewards, finished=False)
    assert rule.compute([*rewards, 1.0, None], finished=True) == rule.compute([*known_rewards, 1.0], finished=True)


def test_an_unfinished_episode_without_rewards_has_the_nonterminal_reward() -> None:
    assert RewardRule().compute([None], finished=False) == 0.0
    assert RewardRule(nonterminal=-1.0).compute([], finished=False) == -1.0


def test_a_finished_episode_without_rewards_fails() -> None:
    with pytest.raises(EnvironmentFault, match="without any reward"):
        RewardRule(nonterminal=-1.0).compute([None, None], finished=True)


@given(rewards=reward_lists, bounds=st.tuples(st.floats(-10, 10), st.floats(-10, 10)))
def test_rewards_stay_within_their_bounds(rewards: list[float | None], bounds: tuple[float, float]) -> None:
    minimum, maximum = sorted(bounds)
    assert minimum <= RewardRule(minimum=minimum, maximum=maximum).compute(rewards, finished=False) <= maximum


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_no_numbers_are_rejected(value: float) -> None:
    for name, rule in (
        ("nonterminal_reward", lambda: RewardRule(nonterminal=value)),
        ("min_reward", lambda: RewardRule(minimum=value)),
        ("max_reward", lambda: RewardRule(maximum=value)),
    ):
        with pytest.raises(UsageError, match=f"{name}: .* is not a finite number"):
            rule()


def test_crossed_bounds_are_rejected() -> None:
    with pytest.raises(UsageError, match="min_reward: 2 is above max_reward, 1"):
        RewardRule(minimum=2, maximum=1)
