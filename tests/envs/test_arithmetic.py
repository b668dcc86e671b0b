from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.envs.arithmetic import Operator, Sum, arithmetic
from rlkit.errors import UsageError
from rlkit.testing import ScriptedPolicy
from rlkit.types import Outcome


def reward(task: Sum, reply: str) -> float:
    outcome = asyncio.run(task.rollout(ScriptedPolicy([reply])))
    assert isinstance(outcome, Outcome)
    return outcome.reward


@pytest.mark.parametrize(
    ("reply", "exact", "first"),
    [
        (" 12", 1, 1),
        (" 12\n7 + 1 = 8", 1, 1),
        (" 12 apples", 0, 1),
        (" 123", 0, 0),
        (" 1", 0, 0),
        ("", 0, 0),
        (" twelve", 0, 0),
        (" -12", 0, 0),
        (" = 12", 0, 0),
        ("１２", 0, 0),
    ],
)
def test_a_reply_is_parsed_by_the_match_setting(reply: str, exact: float, first: float) -> None:
    assert reward(Sum(5, 7, "exact"), reply) == exact
    assert reward(Sum(5, 7, "first_integer"), reply) == first


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(["exact", "first_integer"]))
def test_the_gold_reply_earns_the_full_reward(left: int, right: int, match) -> None:
    task = Sum(left, right, match)
    assert reward(task, task.gold) == 1


def test_each_sum_occurs_once_if_all_fit() -> None:
    assert len({(task.left, task.right) for task in arithmetic(max_operand=9)}) == 100


@given(st.integers(1, 10**6), st.integers(1, 300), st.integers(0, 100))
def test_tasks_are_distinct_and_follow_from_the_seed(max_operand: int, count: int, seed: int) -> None:
    tasks = arithmetic(max_operand=max_operand, count=count, seed=seed)
    assert len(set(tasks)) == len(tasks) == min(count, (max_operand + 1) ** 2)
    assert tasks == arithmetic(max_operand=max_operand, count=count, seed=seed)
    assert all(0 <= task.left <= max_operand and 0 <= task.right <= max_operand for task in tasks)


@given(st.integers(0, 100), st.integers(0, 100))
def test_train_and_test_share_no_task_whatever_the_seeds(train_seed: int, test_seed: int) -> None:
    train = set(arithmetic(max_operand=30, split="train", seed=train_seed))
    test = set(arithmetic(max_operand=30, split="test", seed=test_seed))
    assert not train & test
    assert len(train) + len(test) == 31 * 31
    assert 0.1 < len(test) / (31 * 31) < 0.3


def test_an_empty_split_is_rejected() -> None:
    with pytest.raises(UsageError, match="raise max_operand"):
        arithmetic(max_operand=1, split="test")


@given(st.sets(st.sampled_from(["+", "-", "*"]), min_size=1), st.integers(0, 50), st.integers(1, 12), st.integers(0, 9))
def test_operators_have_equal_shares_and_numbers_are_between_the_ends(
    operators: set[Operator], min_operand: int, width: int, seed: int
) -> None:
    tasks = arithmetic(
        min_operand=min_operand, max_operand=min_operand + width, operators=sorted(operators), count=60, seed=seed
    )
    counts = [sum(task.operator == operator for task in tasks) for operator in operators]
    assert max(counts) - min(counts) <= 1
    assert len(set(tasks)) == len(tasks)
    for task in tasks:
        assert min_operand <= min(task.left, task.right) <= max(task.left, task.right) <= min_operand + width
        assert task.result == eval(f"{task.left}{task.operator}{task.right}")
    assert all(reward(task, task.gold) == 1 for task in tasks[: len(operators)])


def test_impossible_numbers_are_rejected() -> None:
    with pytest.raises(UsageError, match="min_operand: 10 is above max_operand, 9"):
        arithmetic(min_operand=10)
