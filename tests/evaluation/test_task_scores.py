"""Endings of episodes, and scores of single tasks."""

from __future__ import annotations

from dataclasses import asdict, replace

from hypothesis import given
from hypothesis import strategies as st

from rlkit.evaluation.task_scores import count_endings, describe_ending, score_tasks
from rlkit.types import Group
from tests.builders import episode, group

rewards = st.lists(st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=5), max_size=8)


def test_ending_is_solved_or_reported_or_failed() -> None:
    assert describe_ending(episode(1.0)) == "solved"
    assert describe_ending(episode(0.5)) == "completed"
    assert describe_ending(replace(episode(0.0), info={"ended": "timeout"})) == "timeout"
    assert describe_ending(replace(episode(None), error="environment_error: it died")) == "failed: environment_error"
    assert describe_ending(replace(episode(None), error="it died")) == "failed"


def test_a_task_is_scored_over_its_attempts() -> None:
    (score,) = score_tasks([group([1.0, 0.5, None, 0.0], env="terminal")])
    assert asdict(score) == {
        "env": "terminal",
        "task": "task",
        "attempts": 4,
        "solved": 1,
        "reward": 0.5,
        "endings": {"solved": 1, "completed": 2, "failed": 1},
    }
    assert count_endings([score, score]) == {"completed": 4, "failed": 2, "solved": 2}


@given(rewards)
def test_every_episode_is_counted_under_one_ending(rewards_by_task: list[list[float | None]]) -> None:
    groups: list[Group] = [group(group_rewards, draw=draw) for draw, group_rewards in enumerate(rewards_by_task)]
    scores = score_tasks(groups)
    assert sum(count_endings(scores).values()) == sum(map(len, rewards_by_task))
