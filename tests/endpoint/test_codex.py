"""Codex, the unmodified program, at the endpoint of a rollout: its session is one token-exact conversation."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rlkit.policy import Limits
from rlkit.testing import ScriptedPolicy
from tests.calling_model import train_program
from tests.limits import HANG_S

PACKAGE = "@openai/codex@0.169.0"
INSTALL_S = 300

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def codex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if shutil.which("npm") is None:
        pytest.skip("needs npm, to install Codex")
    folder = tmp_path_factory.mktemp("codex")
    command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", PACKAGE]
    install = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if install.returncode:
        pytest.skip(f"npm cannot install {PACKAGE}: {install.stderr.strip()[-200:]}")
    yield folder / "node_modules" / ".bin" / "codex"
    shutil.rmtree(folder)  # 400 MB


CONFIG = """
model = "{model}"
model_provider = "rlkit"

[model_providers.rlkit]
name = "rlkit"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""


BUILT_IN_PROVIDER = """
model = "{model}"
openai_base_url = "{url}"
"""


def play(
    codex: Path,
    folder: Path,
    policy: ScriptedPolicy,
    *sessions: Sequence[str],
    model: str = "policy",
    config: str = CONFIG,
) -> list[str]:
    """Return the output of Codex for each session, in one folder of work."""

    async def main() -> list[str]:
        async with policy.endpoint() as endpoint:
            (folder / "config.toml").write_text(config.format(model=model, url=endpoint.url))
            (folder / "auth.json").write_text(json.dumps({"OPENAI_API_KEY": endpoint.key}))
            variables = {"PATH": os.environ["PATH"], "HOME": str(folder), "CODEX_HOME": str(folder)}
            return [await run(session, {**variables, **endpoint.variables}) for session in sessions]

    async def run(session: Sequence[str], variables: dict[str, str]) -> str:
        process = await asyncio.create_subprocess_exec(
            codex, "exec", *session, "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
            cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            async with asyncio.timeout(HANG_S):
                return (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                process.kill()

    return asyncio.run(main())


def write_call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_session_with_its_shell_is_one_conversation(codex: Path, tmp_path: Path) -> None:
    policy = ScriptedPolicy([
        "<think>Both at once.</think>Looking." + write_call("exec_command", cmd="echo 4${X}2 > answer.txt") * 2,
        write_call("exec_command", cmd="cat answer.txt"),
        write_call("multi_agent_v1__close_agent", target="nobody"),
        write_call("unknown"),
        "<think>Done.</think>All is done.",
        "<think>Still.</think>It still is.",
    ])  # fmt: skip
    first, second = play(codex, tmp_path, policy, ["work"], ["resume", "--last", "and again"])
    assert "All is done." in first
    assert "It still is." in second
    assert (tmp_path / "answer.txt").read_text() == "42\n"
    assert [turn.parent for turn in policy.turns] == [None, 0, 1, 2, 3, 4]
    last = policy.prompts[-1]
    assert last.index("Output:\n42\n") < last.index("invalid agent id") < last.index("unsupported call: unknown")
    assert last.index("All is done.") < last.index("and again")
    assert "web_search" not in last


def test_the_built_in_provider_does_not_wait_for_websockets(codex: Path, tmp_path: Path) -> None:
    policy = ScriptedPolicy(["Done."])
    (output,) = play(codex, tmp_path, policy, ["work"], config=BUILT_IN_PROVIDER)
    assert "Done." in output
    assert "Reconnecting" not in output


def test_a_patch_is_the_text_of_a_custom_tool(codex: Path, tmp_path: Path) -> None:
    patch = "*** Begin Patch\n*** Add File: new.txt\n+hello\n*** End Patch\n"
    policy = ScriptedPolicy([write_call("apply_patch", input=patch), "Done."])
    play(codex, tmp_path, policy, ["work"], model="gpt-5.5")
    assert (tmp_path / "new.txt").read_text() == "hello\n"
    assert [turn.parent for turn in policy.turns] == [None, 0]


@pytest.mark.parametrize(
    ("limits", "words"),
    [(Limits(max_turns=1), "max_turns"), (Limits(context_tokens=20_000), "ran out of room in the model's context")],
)
def test_a_limit_ends_the_session(codex: Path, tmp_path: Path, limits: Limits, words: str) -> None:
    policy = ScriptedPolicy([write_call("exec_command", cmd="echo")] * 2, limits=limits)
    (output,) = play(codex, tmp_path, policy, ["work"])
    assert words in output
    assert len(policy.turns) <= 1


def test_a_reply_that_is_cut_ends_the_session(codex: Path, tmp_path: Path) -> None:
    policy = ScriptedPolicy(["a long reply"], max_tokens=4)
    (output,) = play(codex, tmp_path, policy, ["work"])
    assert "max_output_tokens" in output
    assert len(policy.turns) == 1


AGENT = """#!/bin/sh
export HOME=$PWD CODEX_HOME=$PWD
cat > config.toml <<EOF
{config}
EOF
exec {codex} exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "Do the work."
"""


def test_a_model_on_the_engine_is_trained_on_its_calls(
    codex: Path, cache: Path, can_sandbox: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
    agent = AGENT.format(codex=codex, config=CONFIG.format(model="policy", url="$OPENAI_BASE_URL"))
    train_program(tmp_path / "model", agent, tool="exec_command", argument="cmd", shown=codex.parents[2], steps=2)
