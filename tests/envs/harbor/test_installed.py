"""Harbor's installed agents: real programs in real trials, whose model is the policy of a rollout.

The tests with a program run where it is on the PATH, as after `uv tool install mini-swe-agent`.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from harbor.models.trial.config import EnvironmentConfig

import rlkit
from rlkit._util import threads
from rlkit.envs.harbor import harbor
from rlkit.envs.harbor.settings import Agent, TrialSettings, make_environment
from rlkit.envs.harbor.task import HarborTask
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.policy import Limits
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.testing import ByteChat, ScriptedPolicy, ScriptedSampler
from rlkit.tools.audit import audit_run
from rlkit.types import Json, Outcome, Sampling

from .conftest import write_task
from .playing import TASK, write_simple

pytestmark = [
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]

NO_NETWORK = 'network_mode = "no-network"\n'


def find_program(name: str) -> tuple[str, list[str]]:
    """Return the folder of a program, and the folders of the host that it needs; skip the test without it."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    program = Path(path).resolve()
    packages = next((folder for folder in program.parents if folder.name == "node_modules"), program.parent.parent)
    folders = {Path(path).parent, packages}
    if (python := program.parent / "python").exists():
        folders.add(python.resolve().parent.parent)
    return str(Path(path).parent), sorted(str(folder) for folder in folders if not folder.is_relative_to("/usr"))


def call_tool(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def make_policy(
    write_turn: Callable[[int], str],
    *,
    author: Callable[[str], str] | None = None,
    limits: Limits = Limits(),
) -> RecordingPolicy:
    """A policy whose turn n is written by its number, or with `author` by its prompt."""
    sampler = ScriptedSampler(
        lambda prompt, seed: write_turn(seed) if author is None else author(prompt), chat=ByteChat()
    )
    return RecordingPolicy(
        sampler=lambda: sampler,
        chat=ByteChat(),
        sampling=Sampling(max_tokens=500),
        seed=lambda turn: turn,
        limits=limits,
    )


def play(
    task: Path,
    policy: RecordingPolicy,
    name: str,
    program: str,
    *,
    max_turns: int | None = None,
    trials_dir: Path | None = None,
    **kwargs: Json,
) -> Outcome:
    folder, folders = find_program(program)
    env = {"PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin"}
    settings = TrialSettings(
        environment=make_environment("local", {"host_folders": [*folders]}),
        agent=Agent(name, max_turns, env=env, kwargs=kwargs),
        trials_dir=trials_dir,
        keep="all" if trials_dir else "none",
    )

    @stop_leftover_tasks()
    async def main() -> Outcome:
        return await HarborTask("simple", task, settings).rollout(policy)

    return threads.run(main())


@pytest.fixture
def task(cache: Path, can_sandbox: None, tmp_path: Path) -> Path:
    return write_simple(tmp_path / "task", settings=NO_NETWORK)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "program", "tool", "argument"),
    [
        ("codex", "codex", "exec_command", "cmd"),
        ("claude-code", "claude", "Bash", "command"),
        ("opencode", "opencode", "bash", "command"),
    ],
)
def test_an_agent_of_a_vendor_works_without_an_account(
    task: Path, tmp_path: Path, name: str, program: str, tool: str, argument: str
) -> None:
    command = "echo done > /app/out"

    def write_reply(prompt: str) -> str:
        return "I am finished." if command in prompt else call_tool(tool, **{argument: command})

    policy = make_policy(lambda turn: "", author=write_reply)
    outcome = play(task, policy, name, program, trials_dir=tmp_path / "trials")
    assert (outcome.reward, outcome.info["ended"]) == (1.0, "completed")
    assert len(policy.turns) >= 2
    assert policy.turns[-1].parent is not None  # the reply to the tool's result extends the call


COMMANDS = ["ls", "echo half > /app/out", "echo done > /app/out", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]


def test_mini_swe_agent_works_through_the_endpoint_without_a_network(task: Path, tmp_path: Path) -> None:
    policy = make_policy(lambda turn: call_tool("bash", command=COMMANDS[turn]))
    outcome = play(task, policy, "mini-swe-agent", "mini-swe-agent", trials_dir=tmp_path / "trials")
    assert (outcome.reward, outcome.info["ended"], outcome.truncated) == (1.0, "completed", False)
    assert outcome.metrics["agent_turns"] == len(policy.turns) == 4
    assert [turn.parent for turn in policy.turns] == [None, 0, 1, 2]  # one conversation, token for token
    logs = Path(str(outcome.info["trial"])) / "agent"
    assert json.loads((logs / "trajectory.json").read_text())["steps"]
    assert (logs / "mini-swe-agent.txt").read_text()


def test_an_agent_that_uses_all_turns_is_graded_and_truncated(task: Path) -> None:
    policy = make_policy(lambda turn: call_tool("bash", command=COMMANDS[2]))
    outcome = play(task, policy, "mini-swe-agent", "mini-swe-agent", max_turns=2)
    assert (outcome.reward, outcome.info["ended"], outcome.truncated) == (1.0, "max_turns", True)
    assert (outcome.metrics["agent_turns"], outcome.metrics["max_turns"]) == (2, 1)


@pytest.mark.slow
def test_each_token_of_an_agent_is_trained_once(
    cache: Path, can_sandbox: None, byte_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, folders = find_program("mini-swe-agent")
    chance = '#!/bin/bash\nprintf "0.%05d" $RANDOM > /logs/verifier/reward.txt\n'  # random models never solve the task
    write_task(tmp_path / "task", settings=NO_NETWORK, dockerfile=TASK, test=chance)
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    tasks = harbor(
        tasks_dir=str(tmp_path / "task"),
        agent="mini-swe-agent",
        max_turns=2,
        agent_env={"PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin"},
        environment_kwargs={"host_folders": [*folders]},
    )
    result = rlkit.train(
        model=str(byte_model_dir),
        envs=tasks,
        steps=1,
        batch={"groups": 1, "group_size": 2},
        sampling={"max_tokens": 8},
        trackers=[],
    )
    _, audits = asyncio.run(audit_run(result.directory))
    (audit,) = audits.values()
    assert (audit.mismatch, audit.episodes, audit.turns) == (None, 2, 4)
    assert audit.tokens > 0


def test_the_turns_of_the_run_limit_an_agent_too(task: Path) -> None:
    policy = make_policy(lambda turn: call_tool("bash", command=COMMANDS[2]), limits=Limits(max_turns=1))
    outcome = play(task, policy, "mini-swe-agent", "mini-swe-agent")
    assert (outcome.reward, outcome.info["ended"], outcome.truncated) == (1.0, "max_turns", True)


def test_an_agent_that_never_reaches_its_model_fails_the_episode(task: Path) -> None:
    policy = make_policy(lambda turn: "unused")
    with pytest.raises(EnvironmentFault, match=r"environment_error: EnvironmentDown: .* without a reply of its model"):
        play(task, policy, "mini-swe-agent", "mini-swe-agent", config={"model": {"model_class": "no-such-class"}})


def test_an_agent_that_cannot_be_installed_fails_the_episode(task: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"environment_error: .*aider could not be installed: .*resolve host"):
        play(task, make_policy(lambda turn: "unused"), "aider", "true")


@pytest.mark.parametrize("name", ["mini-swe-agent", "codex", "claude-code", "opencode", "aider", "goose", "openhands"])
def test_agents_of_harbor_that_take_a_base_url_are_known(name: str) -> None:
    agent = Agent(name, max_turns=3)
    assert agent.is_installed
    assert pickle.loads(pickle.dumps(agent)) == agent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "mini-sweagent"},
            r"agent: there is no 'mini-sweagent'\. Did you mean 'mini-swe-agent'\? Known: term",
        ),
        ({"name": "gemini-cli"}, "agent: Harbor's gemini-cli takes no base URL of its model"),
        ({"name": "terminus2"}, r"agent: there is no .terminus2.\. Did you mean .terminus-2.\?"),
        ({"name": "codex", "parser": "xml"}, "parser has no effect on the codex agent"),
        ({"name": "codex", "summarize": True}, "summarize has no effect on the codex agent"),
        ({"name": "mini-swe-agent", "kwargs": {"cost": 1}}, r"agent_kwargs: Unknown option 'cost'\."),
        ({"name": "shell", "env": {"A": "b"}}, "agent_env has no effect on the shell agent"),
    ],
)
def test_a_mistake_about_an_agent_is_one_line(options: Mapping[str, Json], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Agent(**options)  # type: ignore[arg-type]  as a configuration gives them
    assert "\n" not in str(caught.value)


def test_an_agent_in_a_container_needs_an_address_of_this_machine() -> None:
    docker, local = make_environment("docker"), make_environment("local")
    policy = ScriptedPolicy(["fine"])

    async def find_address(environment: EnvironmentConfig) -> str:
        async with TrialSettings(environment=environment, agent=Agent("codex")).open_agent(policy) as agent:
            variables = agent.fields["env"]
            assert isinstance(variables, dict)
            return str(variables["OPENAI_BASE_URL"])

    with pytest.raises(UsageError, match=r"the agent codex cannot reach its model .* set rollouts\.endpoint_host"):
        asyncio.run(find_address(docker))
    policy.endpoint_host = "172.17.0.1"
    assert asyncio.run(find_address(docker)).startswith("http://172.17.0.1:")
    assert asyncio.run(find_address(local)).startswith("http://127.0.0.1:")
