"""`HarborTask`, through real trials in the local sandbox."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harbor.environments.base import BaseEnvironment

import rlkit
from rlkit._util import threads
from rlkit._util.stopwatch import request_wait
from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import load_envs
from rlkit.envs.harbor.agents.agent import AgentEnd, Reason
from rlkit.envs.harbor.outcome import Cause, Reward, Rule, Rules
from rlkit.envs.harbor.settings import Agent, Keep, TrialSettings
from rlkit.envs.harbor.task import UNTIMED_AGENT_S, HarborTask, _find_gravest_fault, agent_timeout_s
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.policy import Limits
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.testing import ScriptedPolicy
from tests.limits import HANG_S

from .conftest import AgentTime, left, write_task
from .playing import Late

pytestmark = [
    pytest.mark.usefixtures("can_sandbox"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]

SOLVE = 'echo "$GREETING $(cat data.txt)" > out\n'


def says(*commands: str, done: bool = False) -> str:
    """A reply in Terminus 2's form."""
    keys = [{"keystrokes": command, "duration": 0.1} for command in commands]
    return json.dumps({"analysis": "a", "plan": "p", "commands": keys, "task_complete": done})


SOLVED = [says(SOLVE), says(done=True), says(done=True)]
UNSOLVED = [says("true\n"), says(done=True), says(done=True)]


def played(task: HarborTask, replies: Sequence[str] | ScriptedPolicy) -> tuple[rlkit.Outcome, ScriptedPolicy]:
    policy = replies if isinstance(replies, ScriptedPolicy) else ScriptedPolicy(replies)

    @stop_leftover_tasks()
    async def main() -> rlkit.Outcome:
        return await task.rollout(policy)

    return threads.run(main()), policy


@pytest.mark.slow
def test_the_reward_is_what_the_verifier_says(cache: Path, task: Path) -> None:
    env = pickle.loads(pickle.dumps(HarborTask("greet", task)))
    solved, policy = played(env, SOLVED)
    assert (solved.reward, solved.truncated, solved.masked) == (1.0, False, False)
    assert solved.metrics["rewards/reward"] == 1.0
    assert solved.metrics["agent_turns"] == len(policy.turns) == 3
    assert {"start", "agent_setup", "agent", "verifier", "sampling", "gates"} == {
        name.removeprefix("seconds/") for name in solved.metrics if name.startswith("seconds/")
    }
    assert solved.info["ended"] == "completed"
    assert played(env, UNSOLVED)[0].reward == 0.0
    assert left(cache) == []


def test_what_a_configuration_says_of_the_environment_reaches_the_class_that_it_names(
    cache: Path, tmp_path: Path
) -> None:
    from .environments import RecordingSandbox

    args = {
        "tasks_dir": str(write_task(tmp_path / "task", settings="cpus = 2\nmemory_mb = 555\nstorage_mb = 666\n")),
        "environment": f"{RecordingSandbox.__module__}:{RecordingSandbox.__name__}",
        "environment_kwargs": {"region": "here"},
        "cpus": 1,
        "memory_mb": 777,
        "storage_mb": 888,
        "trials_dir": str(tmp_path / "kept"),
        "keep_trials": "all",
    }
    config = load_config([], settings={"envs": {"terminal": {"env": "harbor", "args": args}}}).config
    (env,) = load_envs("terminal", config.envs["terminal"], field="envs.terminal", seed=0)
    assert isinstance(env, HarborTask)
    RecordingSandbox.starts.clear()
    assert played(env, SOLVED)[0].reward == 1.0
    assert RecordingSandbox.starts == [("here", 1, 777, 888)]
    assert len(list((tmp_path / "kept").iterdir())) == 1


SERVICES = {
    "modal": "harbor.environments.modal:ModalEnvironment",
    "daytona": "harbor.environments.daytona.environment:DaytonaEnvironment",
    "e2b": "harbor.environments.e2b:E2BEnvironment",
    "runloop": "harbor.environments.runloop:RunloopEnvironment",
}
"""Harbor's classes of environments whose services need an account."""


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_asked_for_the_image_and_the_resources(
    name: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, class_name = SERVICES[name].partition(":")
    environment_class, starts = getattr(import_module(module), class_name), list[Any]()

    async def start(self: BaseEnvironment, force_build: bool) -> None:
        starts.append((self, force_build))
        raise RuntimeError("there is no account")

    async def stop(self: BaseEnvironment, delete: bool) -> None:
        pass

    monkeypatch.setattr(f"{module}._HAS_{name.upper()}", True)  # its SDK, which is not asked for anything
    monkeypatch.setattr(environment_class, "start", start)
    monkeypatch.setattr(environment_class, "stop", stop)
    settings = 'cpus = 2\nmemory_mb = 555\nstorage_mb = 666\ndocker_image = "registry.test/own:1"\n'
    args = {
        "tasks_dir": str(write_task(tmp_path / "task", settings=settings, dockerfile=None)),
        "environment": name,
        "environment_kwargs": {"sandbox_timeout_secs": 7200} if name == "modal" else {},
        "cpus": 4,
        "memory_mb": 8192,
        "storage_mb": 20480,
        "force_build": True,
    }
    config = load_config([], settings={"envs": {"terminal": {"env": "harbor", "args": args}}}).config
    (env,) = load_envs("terminal", config.envs["terminal"], field="envs.terminal", seed=0)
    assert isinstance(env, HarborTask)
    with pytest.raises(EnvironmentFault, match="there is no account"):
        played(env, SOLVED)
    ((environment, force_build),) = starts
    assert (type(environment), force_build) == (environment_class, True)
    task_config = environment.task_env_config
    assert (task_config.docker_image, task_config.build_timeout_sec) == ("registry.test/own:1", 600)
    assert (task_config.cpus, task_config.memory_mb, task_config.storage_mb) == (4, 8192, 20480)
    if name == "modal":
        assert (environment._sandbox_timeout, environment._cpu_config(), environment._memory_config()) == (
            7200,
            (4, 4),
            8192,
        )


def test_an_agent_that_runs_out_of_turns_is_graded_and_called_truncated(cache: Path, task: Path) -> None:
    env = HarborTask("greet", task, TrialSettings(agent=Agent(max_turns=1)))
    outcome, _ = played(env, SOLVED)
    assert (outcome.reward, outcome.truncated, outcome.metrics["max_turns"]) == (1.0, True, 1.0)


def test_an_agent_that_runs_out_of_time_is_worth_what_the_rules_say(
    cache: Path, task: Path, agent_time: AgentTime
) -> None:
    limit_s = agent_time.limit_s
    slow = [says(SOLVE), says("sleep 60\n").replace("0.1", "60")]
    for rule, reward, masked in (("verify", 1.0, False), ("zero", 0.0, False), ("mask", 1.0, True)):
        env = HarborTask("greet", task, TrialSettings(agent_timeout_s=limit_s, rules=Rules(timeout=rule)))  # type: ignore[arg-type]
        outcome, policy = played(env, Late(slow, agent_time))
        assert (outcome.reward, outcome.masked, outcome.truncated) == (reward, masked, True)
        assert outcome.metrics["timeout"] == 1.0
        assert len(policy.turns) == 2
    with pytest.raises(EnvironmentFault, match=r"^timeout: AgentTimeoutError: "):
        env = HarborTask("greet", task, TrialSettings(agent_timeout_s=limit_s, rules=Rules(timeout="drop")))
        played(env, Late(slow, agent_time))


@pytest.mark.parametrize(
    ("task_settings", "settings", "limit_s"),
    [
        ("", TrialSettings(), UNTIMED_AGENT_S),
        ("", TrialSettings(agent=Agent(max_turns=3)), None),
        ("", TrialSettings(agent_timeout_s=7.0), 7.0),
        ("[agent]\ntimeout_sec = 90.0\n", TrialSettings(), None),
        ("[[steps]]\nname = 'one'\n[steps.agent]\ntimeout_sec = 90.0\n", TrialSettings(), None),
    ],
)
def test_an_agent_without_a_turn_limit_has_a_time_limit(
    task_settings: str, settings: TrialSettings, limit_s: float | None, tmp_path: Path
) -> None:
    (tmp_path / "task.toml").write_text(f'version = "1.0"\n{task_settings}')
    assert agent_timeout_s(tmp_path, settings) == limit_s


def test_an_agent_without_a_turn_limit_ends_when_its_context_is_full(cache: Path, task: Path) -> None:
    env = HarborTask("greet", task)  # it types on and on, and each turn adds to the conversation
    outcome, policy = played(
        env, ScriptedPolicy(lambda prompt: says("echo more\n"), limits=Limits(context_tokens=6000), max_tokens=600)
    )
    assert (outcome.reward, outcome.truncated, outcome.metrics["overflow"]) == (0.0, True, 1.0)
    assert len(policy.turns) > 3


def test_a_verifier_without_output_gives_no_reward(cache: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "silent", test="#!/bin/bash\n")
    with pytest.raises(EnvironmentFault, match=r"^verifier_error: RewardFileNotFoundError: No reward file"):
        played(HarborTask("silent", task), SOLVED)


@pytest.mark.parametrize(
    ("verdict", "error"),
    [("true > {}/reward.txt", "RewardFileEmptyError"), ("echo nan > {}/reward.txt", "VerifierOutputParseError"),
     ("echo '[1]' > {}/reward.json", "VerifierOutputParseError"), ("echo 1 > {}/reward.json", "ValidationError"),
     ("sleep 3600", "VerifierTimeoutError")],
)  # fmt: skip
def test_tests_without_a_verdict_are_a_verifier_error(cache: Path, tmp_path: Path, verdict: str, error: str) -> None:
    task = write_task(tmp_path / "odd", test="#!/bin/bash\n" + verdict.format("/logs/verifier"))
    with pytest.raises(EnvironmentFault, match=f"^verifier_error: {error}: "):
        limit_s = 1.0 if "sleep" in verdict else HANG_S
        played(HarborTask("odd", task, TrialSettings(verifier_timeout_s=limit_s)), SOLVED)


@pytest.mark.parametrize(
    ("steps", "reason", "gravest"),
    [
        (["AgentTimeoutError", "VerifierTimeoutError"], "completed", "verifier_error"),
        (["AgentTimeoutError", "HealthcheckError"], "overflow", "environment_error"),
        (["AgentTimeoutError", None], "service_error", "service_error"),
        (["AgentTimeoutError", None], "overflow", "timeout"),
        ([None, None], "overflow", "overflow"),
        ([None, None], "max_turns", None),
    ],
)
def test_the_gravest_of_several_faults_decides(steps: list[str | None], reason: Reason, gravest: Cause | None) -> None:
    played = [SimpleNamespace(exception_info=name and SimpleNamespace(exception_type=name)) for name in steps]
    result = SimpleNamespace(exception_info=None, step_results=played)
    assert _find_gravest_fault(result, AgentEnd(reason, ""))[0] == gravest  # type: ignore[arg-type]  as Harbor's results are read


class Refusing(ScriptedPolicy):
    """A policy whose chat template takes no second turn."""

    async def chat(self, messages: Sequence[rlkit.Message], **options: Any) -> rlkit.Reply:
        if len(messages) > 1:
            raise UsageError("the model's chat template rejects the conversation")
        return await super().chat(messages, **options)


@pytest.mark.parametrize("rule", ["zero", "drop"])
def test_an_unplayable_configuration_ends_the_run(cache: Path, task: Path, rule: Rule) -> None:
    rules = Rules(agent_error=rule, environment_error="verify")
    with pytest.raises(UsageError, match=r"^the model's chat template rejects the conversation$"):
        asyncio.run(HarborTask("greet", task, TrialSettings(rules=rules)).rollout(Refusing(SOLVED)))


class Outage(ScriptedPolicy):
    """A policy whose service answers nobody at its second turn."""

    excused_s = silent_s = 0.0

    def __init__(self, replies: Sequence[str], agent_time: AgentTime) -> None:
        super().__init__(replies)
        self._agent_time = agent_time

    async def chat(self, messages: Sequence[rlkit.Message], **options: Any) -> rlkit.Reply:
        if len(messages) == 1:
            return await super().chat(messages, **options)
        with request_wait(self):
            for _ in range(20):
                await asyncio.sleep(0.1)
                self.excused_s += 0.1
            self._agent_time.end()
            await asyncio.Event().wait()
        raise AssertionError


def test_a_service_outage_is_not_an_agent_timeout(cache: Path, task: Path, agent_time: AgentTime) -> None:
    message = r"^environment_error: AgentTimeoutError: .* seconds, 2 of them in a service outage$"
    settings = TrialSettings(agent_timeout_s=agent_time.limit_s)
    with pytest.raises(EnvironmentFault, match=message):
        asyncio.run(HarborTask("greet", task, settings).rollout(Outage(SOLVED, agent_time)))


def test_several_rewards_are_weighted_and_recorded_as_metrics(cache: Path, tmp_path: Path) -> None:
    test = """#!/bin/bash
echo '{"tests": 0.5, "style": 1}' > /logs/verifier/reward.json
"""
    task = write_task(tmp_path / "many", test=test)
    weights = TrialSettings(reward=Reward(weights={"tests": 1.0, "style": 0.25}))
    outcome, _ = played(HarborTask("many", task, weights), UNSOLVED)
    assert outcome.reward == 0.75
    assert (outcome.metrics["rewards/tests"], outcome.metrics["rewards/style"]) == (0.5, 1.0)


def test_a_task_with_steps_is_played_to_the_end(cache: Path) -> None:
    steps = Path(__file__).parents[3] / "examples" / "tasks" / "two-steps"
    count = [says("sort -u words.txt | wc -l > count.txt\n"), says(done=True), says(done=True)]
    outcome, _ = played(HarborTask("two-steps", steps), [*count, *UNSOLVED])
    assert outcome.reward == 0.5


@pytest.mark.parametrize(
    ("keep", "expected_names"), [("all", ["solved", "silent"]), ("failed", ["silent"]), ("none", [])]
)
def test_the_folders_of_trials_that_are_to_stay_do(
    cache: Path, tmp_path: Path, keep: Keep, expected_names: list[str]
) -> None:
    settings = TrialSettings(trials_dir=tmp_path / "trials", keep=keep)
    outcome, _ = played(HarborTask("solved", write_task(tmp_path / "solved"), settings), SOLVED)
    with pytest.raises(EnvironmentFault):
        played(HarborTask("silent", write_task(tmp_path / "silent", test=""), settings), SOLVED)
    names = [path.name.partition("__")[0] for path in (tmp_path / "trials").iterdir()]
    assert sorted(names) == sorted(expected_names)
    assert ("trial" in outcome.info) == (keep == "all")
