"""The reference of the command line has each command with its arguments and options, as its help has them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rlkit.cli.app import app

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hook() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "cli_hook.py"))


def read_help(*path: str) -> str:
    return CliRunner().invoke(app, [*path, "--help"], prog_name="rlkit", terminal_width=200).output


def find_commands(*path: str) -> list[tuple[str, ...]]:
    """Every command below one, as the words that `--help` lists."""
    names = re.findall(r"^  ([a-z-]+) ", read_help(*path).partition("\nCommands:\n")[2].partition("\n\n")[0], re.M)
    return [each for name in names for each in [(*path, name), *find_commands(*path, name)]]


def read_section(page: str, *path: str) -> str:
    return re.split(r"\n#+ ", page.partition(f"# `rlkit {' '.join(path)}`\n")[2])[0]


def test_every_command_is_there_with_its_arguments_and_options(hook: dict[str, Any]) -> None:
    page = hook["commands_markdown"](app)
    shared = page.partition("## Options of every command")[2].partition("\n## ")[0]
    commands = find_commands()
    assert len(commands) > 35
    for path in commands:
        section = read_section(page, *path)
        assert section, path
        helped = read_help(*path)
        assert " ".join(helped.partition("Usage: ")[2].partition("\n")[0].split()) in section
        if "\nCommands:\n" in helped:
            continue
        names = re.findall(r"^  (?:-\w, )?(--[\w-]+)", helped, re.M)
        names += re.findall(r"^  (\S+)", helped.partition("\nArguments:\n")[2].partition("\n\n")[0], re.M)
        assert [
            name for name in names if f"`{name}" not in section + shared and f", {name}" not in section + shared
        ] == []


def test_a_renamed_option_shows(hook: dict[str, Any]) -> None:
    def make(option: str) -> str:
        small = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})

        @small.callback()
        def root() -> None:
            """Do nothing."""

        @small.command()
        def go(speed: int = typer.Option(1, option, help="Speed | of a *step*, < 3; see --json.")) -> None:
            """Go."""

        @small.command()
        def stop() -> None:
            """Stop."""

        return hook["commands_markdown"](small)

    assert "| `--speed <int>` | Speed \\| of a \\*step\\*, &lt; 3; see `--json`.  [default: 1] |" in make("--speed")
    assert "--speed" not in make("--pace")
    assert "`--pace <int>`" in read_section(make("--pace"), "go")
    assert "| `-h, --help` |" in make("--pace")


def test_each_guide_belongs_to_a_command(hook: dict[str, Any]) -> None:
    assert set(hook["GUIDES"]) <= {" ".join(path) for path in find_commands()}


def test_the_page_has_the_mark(hook: dict[str, Any]) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="cli.md"))
    text = hook["on_page_markdown"]((ROOT / "docs" / "cli.md").read_text(), page=page)
    assert hook["commands_markdown"](app) in text
    with pytest.raises(ValueError, match="has no line"):
        hook["on_page_markdown"]("no mark", page=page)
