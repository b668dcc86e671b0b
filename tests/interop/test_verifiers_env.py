"""rlkit's environments in verifiers, in a virtual environment of their own."""

from __future__ import annotations

from typing import Any

import pytest

from rlkit.envs.arithmetic import arithmetic
from tests.interop.frameworks import VERIFIERS, install, run_program
from tests.interop.played_tasks import answer

pytestmark = pytest.mark.slow

OWN_TASKSET = """
from rlkit.envs.arithmetic import arithmetic
from rlkit.interop.verifiers_env import RlkitHarness, RlkitTaskset

__all__ = ["OwnSums", "RlkitHarness"]

class OwnSums(RlkitTaskset):
    envs = arithmetic(count=3, seed=1)
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    python = install(tmp_path_factory.mktemp("verifiers") / "venv", *VERIFIERS)
    work = tmp_path_factory.mktemp("work")
    (work / "own_sums.py").write_text(OWN_TASKSET)
    return run_program(python, "verifiers_program.py", cwd=work)


@pytest.fixture
def traces(played: dict[str, Any]) -> dict[str, Any]:
    return played["traces"]


def test_rewards_of_verifiers_are_those_of_the_environment(traces: dict[str, Any]) -> None:
    rewards = list[float]()
    for task in arithmetic(count=4, seed=1):
        reply, trace = answer(task.prompt()), traces[task.task_id]
        assert trace["ok"]
        assert trace["rewards"] == {"reward": float(reply == str(task.result))}
        assert trace["info"]["answer"] == reply
        assert trace["messages"] == [task.prompt(), reply]
        rewards.append(trace["rewards"]["reward"])
    assert 0 < sum(rewards) < 4


def test_a_failed_episode_is_an_error_of_the_harness_without_a_reward(traces: dict[str, Any]) -> None:
    trace = traces["broken"]
    assert not trace["ok"]
    assert trace["rewards"] == {}
    ((kind, message),) = trace["errors"]
    assert kind == "HarnessError"
    assert "the grader died" in message


def test_a_rejected_request_is_an_error_of_the_provider(traces: dict[str, Any]) -> None:
    ((kind, message),) = traces["rejected"]["errors"]
    assert kind == "ProviderError"
    assert "rejected by the provider" in message
    assert traces["rejected"]["rewards"] == {}


def test_an_episode_beyond_its_time_limit_is_an_error_without_a_reward(traces: dict[str, Any]) -> None:
    trace = traces["slow"]
    assert trace["rewards"] == {"reward": None}
    assert not trace["ok"]
    assert [kind for kind, _ in trace["errors"]] == ["TaskError"]


def test_a_limit_of_verifiers_ends_an_episode_that_grades_the_result_so_far(traces: dict[str, Any]) -> None:
    trace = traces["counting"]
    assert trace["stop"] == "max_turns"
    assert trace["rewards"] == {"reward": 0.75}
    assert trace["metrics"] == {"replies": 3.0}
    assert trace["info"] == {"truncated": True}


def test_tools_reach_the_model_and_its_calls_reach_the_environment(traces: dict[str, Any]) -> None:
    assert traces["looking"]["rewards"] == {"reward": 1.0}
    assert traces["looking"]["messages"][-2:] == ["a cat there", "seen: a cat there"]


def test_settings_of_the_sampler_are_those_of_verifiers(played: dict[str, Any]) -> None:
    assert [settings for settings in played["settings"] if settings != {"model": "m", "temperature": 0.5}] == []


def test_a_file_names_a_taskset_for_the_commands_of_verifiers(played: dict[str, Any]) -> None:
    assert played["own"] == [task.task_id for task in arithmetic(count=3, seed=1)]


def test_neither_torch_nor_the_sdk_is_loaded(played: dict[str, Any]) -> None:
    assert played["heavy"] == []
