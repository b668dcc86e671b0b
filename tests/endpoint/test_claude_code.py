"""Claude Code, unmodified and without an account, at the endpoint of a rollout."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from rlkit.policy import Limits
from rlkit.testing import ScriptedPolicy
from tests.calling_model import train_program
from tests.limits import HANG_S

PACKAGE = "@anthropic-ai/claude-code@2.1.197"
INSTALL_S = 400

OFFLINE = {"DISABLE_AUTOUPDATER": "1", "DISABLE_ERROR_REPORTING": "1", "DISABLE_TELEMETRY": "1"}
"""Variables that keep Claude Code from talking to its vendor."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("Claude Code needs npm, and there is none")
    folder = tmp_path_factory.mktemp("claude")
    command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install Claude Code: {done.stderr[-300:]}")
    return folder / "node_modules" / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"


def call(name: str, **arguments: str | float) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(policy: ScriptedPolicy, program: Path, folder: Path) -> dict[str, object]:
    """Give Claude Code a task, and return its result."""

    async def main() -> dict[str, object]:
        (home := folder / "home").mkdir()
        (work := folder / "work").mkdir()
        async with policy.endpoint() as endpoint, asyncio.timeout(HANG_S):
            process = await asyncio.create_subprocess_exec(
                "node",
                str(program),
                *("-p", "Say hello.", "--allowedTools", "Bash,Write", "--output-format", "json"),
                cwd=work,
                env={"HOME": str(home), "PATH": os.environ["PATH"], **endpoint.variables, **OFFLINE},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            try:
                return json.loads((await process.communicate())[0])
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()

    return asyncio.run(main())


@pytest.mark.slow
def test_its_turns_extend_each_other(program: Path, tmp_path: Path) -> None:
    replies = [
        f"<think>\ntwo at once\n</think>\n\nI look.{call('Bash', command='echo one > f; cat f')}"
        f"{call('Bash', command='echo two', description='Say two.')}",
        f"<think>\n\n</think>\n\n{call('Bash', command='false')}",
        call("Bash", command="cat f", timeout=5000.0),
        call("Nothing", key=1),
        "It says one.",
    ]
    policy = ScriptedPolicy(replies)
    result = play(policy, program, tmp_path)
    assert (result["result"], result["is_error"]) == ("It says one.", False)
    assert (tmp_path / "work" / "f").read_text() == "one\n"
    # The request for a title demands JSON of a schema: it is an error, not a turn.
    assert [turn.parent for turn in policy.turns] == [None, 0, 1, 2, 3]
    first, second = policy.prompts[1][len(policy.prompts[0]) :], policy.prompts[2][len(policy.prompts[1]) :]
    assert first.endswith("one\ntwo\n")
    assert second.endswith("Exit code 1\n")
    assert "x-anthropic-billing-header" not in policy.prompts[0]


@pytest.mark.slow
def test_a_call_that_it_rewrites_starts_a_segment(program: Path, tmp_path: Path) -> None:
    replies = [call("Bash", command=f"cd {tmp_path}/work && echo one"), call("Bash", command="echo two"), "Done."]
    policy = ScriptedPolicy(replies)
    assert play(policy, program, tmp_path)["result"] == "Done."
    assert [turn.parent for turn in policy.turns] == [None, None, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(max_turns=1), "API Error: 400 the rollout has had its 1 turns"),
        (Limits(context_tokens=1000), "Prompt is too long"),
    ],
)
def test_it_stops_at_a_limit(program: Path, tmp_path: Path, limits: Limits, reason: str) -> None:
    policy = ScriptedPolicy([call("Bash", command="echo one")] * 2, limits=limits)
    result = play(policy, program, tmp_path)
    assert str(result["result"]).startswith(reason)
    assert result["is_error"]
    assert len(policy.turns) == (limits.max_turns or 0)


AGENT = """#!/bin/sh
export HOME=$PWD {settings}
exec node {program} -p "Do the work." --tools Bash --allowedTools Bash --output-format json
"""


@pytest.mark.slow
def test_a_model_on_the_engine_is_trained_on_its_calls(
    program: Path, cache: Path, can_sandbox: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
    agent = AGENT.format(program=program, settings=" ".join(f"{name}={value}" for name, value in OFFLINE.items()))
    train_program(tmp_path / "model", agent, tool="Bash", argument="command", shown=program.parents[3], steps=1)
