from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.scores import ending, endings, pass_rate, task_scores
from rlkit.types import Group

from .builders import episode, group

rewards = st.lists(st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=5), max_size=8)


def test_an_episode_ends_solved_or_as_its_environment_says_or_failed() -> None:
    assert ending(episode(1.0)) == "solved"
    assert ending(episode(0.5)) == "completed"
    assert ending(replace(episode(0.0), info={"ended": "timeout"})) == "timeout"
    assert ending(replace(episode(None), error="environment_error: it died")) == "failed: environment_error"
    assert ending(replace(episode(None), error="it died")) == "failed"


def test_a_task_is_scored_over_its_attempts() -> None:
    (score,) = task_scores([group([1.0, 0.5, None, 0.0], env="terminal")])
    assert asdict(score) == {
        "env": "terminal",
        "task": "task",
        "attempts": 4,
        "solved": 1,
        "reward": 0.5,
        "ended": {"solved": 1, "completed": 2, "failed": 1},
    }
    assert endings([score, score]) == {"completed": 4, "failed": 2, "solved": 2}


def test_pass_at_1_is_a_mean_over_tasks_with_an_interval() -> None:
    rate = pass_rate(task_scores([group([1.0, 1.0]), group([1.0, 0.0]), group([0.0, None]), group([None, None])]))
    assert rate is not None
    assert (rate.value, rate.tasks) == (0.5, 3)
    assert 0 < rate.low < 0.5 < rate.high < 1
    assert pass_rate(task_scores([group([None])])) is None


def test_the_interval_of_single_attempts_is_wilsons() -> None:
    rate = pass_rate(task_scores([group([0.0])] * 10))
    assert rate is not None
    assert (rate.value, rate.low) == (0.0, 0.0)
    assert rate.high == pytest.approx(0.2775, abs=1e-4)  # z² / (n + z²)


@given(rewards)
def test_every_episode_ends_somewhere_and_the_rate_lies_in_its_interval(played: list[list[float | None]]) -> None:
    groups: list[Group] = [group(one, draw=draw) for draw, one in enumerate(played)]
    scores = task_scores(groups)
    assert sum(endings(scores).values()) == sum(map(len, played))
    rate = pass_rate(scores)
    assert (rate is None) == all(reward is None for one in played for reward in one)
    if rate is not None:
        assert 0 <= rate.low <= rate.value + 1e-12
        assert rate.value - 1e-12 <= rate.high <= 1
