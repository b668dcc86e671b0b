"""The way over from the predecessors: their documented runs are configurations, and the pages name what there is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlkit.cli.arguments import split
from rlkit.config import load_config

from .cli.conftest import rlkit

__all__ = ["rlkit"]

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "migrating").glob("*.md"))
CONFIGS = [path for path in sorted((ROOT / "examples").rglob("*.yaml")) if "tasks" not in path.parts]
COMMAND = re.compile(r"rlkit train [^`\n]*examples/[^`\n]*")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_is_shown_whole(path: Path, rlkit: Callable[..., Any]) -> None:
    result = rlkit("config", "show", path)
    assert result.exit_code == 0, result.stderr
    assert "model:" in result.stdout


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_commands_of_a_page_are_of_configurations_that_load(path: Path) -> None:
    commands = COMMAND.findall(path.read_text())
    assert commands
    for command in commands:
        words = shlex.split(command)[2:]
        files, values = split([word for word in words if word.startswith("examples/") or "=" in word])
        load_config(files, values)


def test_every_documented_run_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for path in (ROOT / "examples" / "migrated").iterdir():
        assert f"examples/migrated/{path.name}" in text
