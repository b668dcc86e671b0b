from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.limits import HANG_S

COMMANDS = (
    *("train", "resume", "eval", "config", "checkpoints", "serve", "init", "check", "tasks", "doctor"),
    *("export", "sync", "launch", "records"),
)
HEAVY = (
    "torch",
    "transformers",
    "tinker",
    "harbor",
    "openreward",
    "wandb",
    "numpy",
    "pydantic",
    "yaml",
    "rich",
    "httpx",
    "asyncio",
    "ssl",
)
LIGHT = ("rlkit", "rlkit.cli", "rlkit.errors", "rlkit._util", "rlkit._util.redaction")

LOOK = f"""
import sys
from rlkit.cli import main
try:
    main()
except SystemExit:
    pass
library = [name for name in sys.modules if name.startswith("rlkit.") and not name.startswith("rlkit.cli.")]
print("loaded:", *[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
print("library:", *[name for name in library if name not in {LIGHT!r}], file=sys.stderr)
"""


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlkit", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, check=False, env={**os.environ, **environ}
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["config", "show", "-h"]])
def test_help_and_version_load_nothing_heavy(arguments: list[str]) -> None:
    command = [sys.executable, "-c", LOOK, *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert completed.stderr == "loaded:\nlibrary:\n"
    assert completed.stdout


def test_help_names_every_command_and_exit_code(rlkit: Callable[..., Any]) -> None:
    help_text = rlkit("--help").stdout
    assert all(f"\n  {command} " in help_text for command in COMMANDS)
    assert "130" in help_text
    assert "..." not in help_text.split("Commands:")[1].split("Exit codes")[0], "a command's help is cut off"


@pytest.mark.parametrize(
    "arguments",
    [[command] for command in COMMANDS]
    + [["config", "show"], ["config", "schema"], ["checkpoints", "list"], ["checkpoints", "export"]]
    + [["checkpoints", command] for command in ("show", "delete", "prune", "ttl", "download")]
    + [["tasks", "check"], ["tasks", "convert"], ["launch", "beaker"], ["check", "env"], ["check", "service"]],
)
def test_every_command_has_json_and_help(arguments: list[str], rlkit: Callable[..., Any]) -> None:
    result = rlkit(*arguments, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout or arguments in (["config"], ["checkpoints"], ["tasks"], ["launch"], ["check"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["train"],
        ["train", "--nonsense"],
        ["eval"],
        ["config", "nonsense"],
        ["config", "show"],
        ["init"],
        ["check"],
        ["check", "arithmetic", "--tasks", "0"],
        ["check", "arithmetic", "--tasks", "many"],
        ["serve", "--port", "70000"],
        ["serve", "--threads", "0"],
        ["serve", "--threads", "100000000000000000000"],
        ["doctor", "one", "two"],
    ],
)
def test_bad_usage_is_exit_code_2_without_a_traceback(arguments: list[str], rlkit: Callable[..., Any]) -> None:
    result = rlkit(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Error" in result.stderr
    assert "Traceback" not in result.stderr


def test_module_prints_the_version() -> None:
    completed = run("--version")
    assert (completed.returncode, completed.stdout.split()[0]) == (0, "rlkit")


def test_shell_completion_offers_the_commands() -> None:
    completed = run(_RLKIT_COMPLETE="complete_bash", COMP_WORDS="rlkit d", COMP_CWORD="1")
    assert completed.stdout.split() == ["doctor"]


def test_closed_pipe_prints_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "rlkit", "config", "schema"]
    completed = subprocess.run(
        command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=HANG_S, check=False
    )
    os.close(write_end)
    assert completed.stderr == ""
    assert completed.returncode == 0


def test_debug_shows_where_an_error_comes_from(rlkit: Callable[..., Any]) -> None:
    assert "Traceback" not in rlkit("config", "show", "nowhere.yaml").stderr
    result = rlkit("config", "show", "nowhere.yaml", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "nowhere.yaml" in result.stderr
