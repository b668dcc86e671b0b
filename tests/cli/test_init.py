from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_it_says_what_to_do_next(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    result = rlkit("init", "my project")
    assert result.exit_code == 0
    assert "cd 'my project'" in result.stdout
    assert "rlkit train config.yaml" in result.stdout
    assert (tmp_path / "my project" / "env.py").exists()


def test_json_names_the_files(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    record = json.loads(rlkit("init", tmp_path / "p", "--json").stdout)
    assert {Path(file).name for file in record["files"]} == {"README.md", "config.yaml", "env.py", "test_env.py"}


def test_a_folder_with_something_in_it_is_refused(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    result = rlkit("init", ".")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: . is not empty")
    assert result.stdout == ""


def test_a_place_that_cannot_be_written_is_one_line(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = rlkit("init", tmp_path / "file" / "p")
    assert result.exit_code in (1, 2)
    assert result.stderr.startswith("error: ")
    assert "bug" not in result.stderr


def test_the_environment_of_a_new_project_passes_its_check(rlkit: Callable[..., Any], monkeypatch: Any) -> None:
    rlkit("init", "p")
    monkeypatch.chdir("p")
    result = rlkit("check", "config.yaml", "--json", "--tasks", "2")
    assert result.exit_code == 0, result.stdout
    assert json.loads(result.stdout)["ok"] is True
