"""rlkit's environments as tasks of inspect_ai, in a virtual environment of their own."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlkit.envs.arithmetic import arithmetic
from tests.interop.frameworks import INSPECT, install, run_program
from tests.interop.played_tasks import answer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    python = install(tmp_path_factory.mktemp("inspect") / "venv", *INSPECT)
    return run_program(python, "inspect_program.py", cwd=tmp_path_factory.mktemp("work"))


def test_scores_of_inspect_are_the_rewards_of_the_environment(log: dict[str, Any]) -> None:
    assert log["status"] == "success"
    right = 0
    for task in arithmetic(count=4, seed=1):
        reply = answer(task.prompt())
        right += reply == str(task.result)
        for epoch in (1, 2):
            sample = log["samples"][f"{task.task_id} {epoch}"]
            assert sample["score"]["reward"] == (reply == str(task.result))
            assert sample["outcome"]["info"]["answer"] == reply
            assert sample["messages"] == [task.prompt(), reply]
    assert 0 < right < 4
    assert log["means"]["reward"] == [(right + 1 + 0.75) / 6, 6]  # and of the tool and the count


def test_a_failed_episode_is_an_error_without_a_score(log: dict[str, Any]) -> None:
    sample = log["samples"]["broken 1"]
    assert "the grader died" in sample["error"]
    assert math.isnan(sample["score"])
    assert sample["outcome"] is None


def test_an_episode_beyond_the_time_limit_has_no_score(log: dict[str, Any]) -> None:
    sample = log["samples"]["slow 1"]
    assert math.isnan(sample["score"])
    assert sample["outcome"] is None


def test_a_limit_of_inspect_ends_an_episode_that_grades_the_result_so_far(log: dict[str, Any]) -> None:
    sample = log["samples"]["counting 2"]
    assert sample["error"] is None
    assert sample["score"] == {"reward": 0.75, "replies": 3.0}
    assert sample["outcome"]["truncated"]
    assert log["means"]["replies"] == [3.0, 1]


def test_tools_reach_the_model_and_its_calls_reach_the_environment(log: dict[str, Any]) -> None:
    sample = log["samples"]["looking 1"]
    assert sample["score"]["reward"] == 1.0
    assert sample["messages"][-2:] == ["a cat there", "seen: a cat there"]


def test_neither_torch_nor_the_sdk_is_loaded(log: dict[str, Any]) -> None:
    assert log["heavy"] == []
