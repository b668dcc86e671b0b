"""Harbor's installed agents: real programs in real trials, whose model is the policy of a rollout.

A test with a program installs it, unless it is on the PATH. Some programs are too large for that, or need another
Node.js: their tests run where they are installed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from harbor.agents.factory import AgentFactory
from harbor.models.agent.name import AgentName
from harbor.models.trial.config import EnvironmentConfig

from rlkit._util import threads
from rlkit.envs.harbor import harbor
from rlkit.envs.harbor.agents import installed
from rlkit.envs.harbor.settings import Agent, TrialSettings, make_environment
from rlkit.envs.harbor.task import HarborTask
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.policy import Limits
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.testing import ByteChat, ScriptedPolicy, ScriptedSampler
from rlkit.types import Json, Outcome, Sampling
from tests import calling_model

from .playing import write_simple

WRITING = "echo done > /app/out"

pytestmark = [
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]

NO_NETWORK = 'network_mode = "no-network"\n'


NODE_PACKAGES = {
    "claude": "@anthropic-ai/claude-code@2.1.197",
    "codex": "@openai/codex@0.169.0",
    "opencode": "opencode-ai@1.18.33",
    "qwen": "@qwen-code/qwen-code@0.15.10",
}
PYTHON_PACKAGES = {"mini-swe-agent": "mini-swe-agent==2.4.6"}
CLAUDE = '#!/bin/sh\nexec node "$(dirname "$0")/../@anthropic-ai/claude-code/cli-wrapper.cjs" "$@"\n'
INSTALL_S = 300


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for programs that are not on the PATH."""
    yield (folder := tmp_path_factory.mktemp("programs"))
    shutil.rmtree(folder)  # a gigabyte


def find_program(name: str, programs: Path) -> tuple[str, list[str]]:
    """Return the folder of a program, and the folders of the host that it needs; install it, or skip the test."""
    path = shutil.which(name) or shutil.which(name, path=programs / "bin") or install(name, programs)
    program = Path(path).resolve()
    packages = next((folder for folder in program.parents if folder.name == "node_modules"), program.parent.parent)
    folders = {Path(path).parent, packages}
    if (python := program.parent / "python").exists():
        folders.add(python.resolve().parent.parent)
    return str(Path(path).parent), sorted(str(folder) for folder in folders if not folder.is_relative_to("/usr"))


def install(name: str, programs: Path) -> str:
    """Install a program, and return its path; skip the test if that is impossible here."""
    if name in NODE_PACKAGES:
        folder = programs / name
        execute(
            "npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder, NODE_PACKAGES[name]
        )
        path = folder / "node_modules" / ".bin" / name
        if name == "opencode":
            execute("node", folder / "node_modules" / "opencode-ai" / "postinstall.mjs")
        if name == "claude":  # its own file is written by a script of the installation
            path.unlink()
            path.write_text(CLAUDE)
            path.chmod(0o755)
        return str(path)
    if name not in PYTHON_PACKAGES:
        pytest.skip(f"{name} is not installed")
    folders = {"UV_TOOL_DIR": str(programs / "tools"), "UV_TOOL_BIN_DIR": str(programs / "bin")}
    python = ["--no-managed-python", "--python", sys.executable]
    execute(os.environ.get("UV", "uv"), "tool", "install", *python, PYTHON_PACKAGES[name], variables=folders)
    return str(programs / "bin" / name)


def execute(*command: str | Path, variables: Mapping[str, str] = {}) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}")
    done = subprocess.run(
        [*map(str, command)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"{command[0]} cannot install {command[-1]}: {done.stderr.strip()[-300:]}")


def call_tool(name: str, **arguments: Json) -> str:
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
    program: tuple[str, list[str]],
    *,
    max_turns: int | None = None,
    trials_dir: Path | None = None,
    **kwargs: Json,
) -> Outcome:
    folder, folders = program
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
    ("name", "program", "tool", "arguments"),
    [
        ("codex", "codex", "exec_command", {"cmd": WRITING}),
        ("claude-code", "claude", "Bash", {"command": WRITING}),
        ("opencode", "opencode", "bash", {"command": WRITING}),
        ("qwen-coder", "qwen", "run_shell_command", {"command": WRITING, "is_background": False}),
        ("pi", "pi", "bash", {"command": WRITING}),  # needs Node.js 22
        ("code-puppy", "code-puppy", "shell", {"command": WRITING}),
    ],
)
def test_an_agent_works_without_an_account(
    task: Path, programs: Path, tmp_path: Path, name: str, program: str, tool: str, arguments: Mapping[str, Json]
) -> None:
    def write_reply(prompt: str) -> str:
        return "I am finished." if WRITING in prompt else call_tool(tool, **arguments)

    policy = make_policy(lambda turn: "", author=write_reply)
    outcome = play(task, policy, name, find_program(program, programs), trials_dir=tmp_path / "trials")
    assert (outcome.reward, outcome.info["ended"]) == (1.0, "completed")
    assert len(policy.turns) >= 2
    if name != "code-puppy":  # it adds arguments to the call
        assert policy.turns[-1].parent is not None  # the reply to the tool's result extends the call


@pytest.mark.slow
def test_aider_writes_a_file_from_a_reply(task: Path, programs: Path) -> None:
    policy = make_policy(lambda turn: "out\n```\ndone\n```\n")
    outcome = play(task, policy, "aider", find_program("aider", programs))
    assert (outcome.reward, outcome.info["ended"]) == (1.0, "completed")


SDK_PYTHON = Path("/opt/openhands-sdk-venv/bin/python")


@pytest.mark.slow
@pytest.mark.skipif(not SDK_PYTHON.exists(), reason="the OpenHands SDK is not installed in its place")
def test_the_openhands_sdk_gets_its_runner(task: Path) -> None:
    def write_reply(prompt: str) -> str:
        if WRITING in prompt:
            return call_tool("finish", message="done")
        return call_tool("terminal", command=WRITING, security_risk="LOW", summary="write")

    policy = make_policy(lambda turn: "", author=write_reply)
    folders = [str(SDK_PYTHON.parents[1]), str(SDK_PYTHON.resolve().parents[1])]
    outcome = play(task, policy, "openhands-sdk", ("/usr/bin", folders))
    assert (outcome.reward, outcome.info["ended"]) == (1.0, "completed")
    assert [turn.parent for turn in policy.turns] == [None, 0]


COMMANDS = ["ls", "echo half > /app/out", "echo done > /app/out", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]


@pytest.mark.slow
def test_mini_swe_agent_works_through_the_endpoint_without_a_network(
    task: Path, programs: Path, tmp_path: Path
) -> None:
    policy = make_policy(lambda turn: call_tool("bash", command=COMMANDS[turn]))
    outcome = play(
        task, policy, "mini-swe-agent", find_program("mini-swe-agent", programs), trials_dir=tmp_path / "trials"
    )
    assert (outcome.reward, outcome.info["ended"], outcome.truncated) == (1.0, "completed", False)
    assert outcome.metrics["agent_turns"] == len(policy.turns) == 4
    assert [turn.parent for turn in policy.turns] == [None, 0, 1, 2]  # one conversation, token for token
    logs = Path(str(outcome.info["trial"])) / "agent"
    assert json.loads((logs / "trajectory.json").read_text())["steps"]
    assert (logs / "mini-swe-agent.txt").read_text()


@pytest.mark.slow
def test_an_agent_that_uses_all_turns_is_graded_and_truncated(task: Path, programs: Path) -> None:
    policy = make_policy(lambda turn: call_tool("bash", command=COMMANDS[2]))
    outcome = play(task, policy, "mini-swe-agent", find_program("mini-swe-agent", programs), max_turns=2)
    assert (outcome.reward, outcome.info["ended"], outcome.truncated) == (1.0, "max_turns", True)
    assert (outcome.metrics["agent_turns"], outcome.metrics["max_turns"]) == (2, 1)


@pytest.mark.slow
def test_a_model_on_the_engine_is_trained_on_an_agents_calls(
    task: Path, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
    folder, folders = program = find_program("mini-swe-agent", programs)

    def write_reply(prompt: str, *, seed: int, word: str) -> str:
        if prompt.count("<tool_response>") == 0:
            return calling_model.write_call("bash", command="echo red")
        if prompt.count("<tool_response>") == 1:
            return calling_model.write_call("bash", command=f"echo {word} > out; echo blue")
        return calling_model.write_call("bash", command=COMMANDS[-1])

    def play_once(policy: RecordingPolicy) -> None:
        play(task, policy, "mini-swe-agent", program)

    authors = [partial(write_reply, word=word) for word in ("done", "half")]
    model = calling_model.teach_agent(tmp_path / "model", play_once, authors)
    tasks = harbor(
        tasks_dir=str(task),
        agent="mini-swe-agent",
        max_turns=4,
        agent_env={"PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin"},
        environment_kwargs={"host_folders": [*folders]},
    )
    calling_model.train_agent(model, tasks, steps=1, group_size=8, learning_rate=0.0005)


@pytest.mark.slow
def test_the_turns_of_the_run_limit_an_agent_too(task: Path, programs: Path) -> None:
    policy = make_policy(lambda turn: call_tool("bash", command=COMMANDS[2]), limits=Limits(max_turns=1))
    outcome = play(task, policy, "mini-swe-agent", find_program("mini-swe-agent", programs))
    assert (outcome.reward, outcome.info["ended"], outcome.truncated) == (1.0, "max_turns", True)


@pytest.mark.slow
def test_an_agent_that_never_reaches_its_model_fails_the_episode(task: Path, programs: Path) -> None:
    policy = make_policy(lambda turn: "unused")
    with pytest.raises(EnvironmentFault, match=r"environment_error: EnvironmentDown: .* without a reply of its model"):
        play(
            task,
            policy,
            "mini-swe-agent",
            find_program("mini-swe-agent", programs),
            config={"model": {"model_class": "no-such-class"}},
        )


def test_an_agent_that_cannot_be_installed_fails_the_episode(task: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"environment_error: .*aider could not be installed: .*resolve host"):
        play(task, make_policy(lambda turn: "unused"), "aider", ("/usr/bin", []))


@pytest.mark.parametrize("name", ["mini-swe-agent", "codex", "claude-code", "opencode", "aider", "goose", "openhands"])
def test_agents_of_harbor_that_take_a_base_url_are_known(name: str) -> None:
    agent = Agent(name, max_turns=3)
    assert agent.is_installed
    assert pickle.loads(pickle.dumps(agent)) == agent


def test_agents_whose_installation_copies_files_are_always_installed() -> None:
    names = filter(installed.find_model_name, AgentFactory.registered_names())
    classes = {name: AgentFactory.get_agent_class(AgentName(name)) for name in names}
    copying = {name for name, cls in classes.items() if "environment.upload_" in inspect.getsource(cls.install)}  # type: ignore[attr-defined]  all are installed agents
    assert copying == set(installed._WITH_RUNNER)


@pytest.mark.parametrize(("kwargs", "api"), [({}, "openai-completions"), ({"model_api": "x"}, "x")])
def test_pi_gets_the_option_without_which_it_refuses_a_base_url(kwargs: Mapping[str, Json], api: str) -> None:
    settings = TrialSettings(environment=make_environment("local"), agent=Agent("pi", kwargs=kwargs))

    async def find_kwargs() -> object:
        async with settings.open_agent(ScriptedPolicy(["fine"])) as agent:
            return agent.fields["kwargs"]

    assert asyncio.run(find_kwargs()) == {"model_api": api}


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
