from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlkit.errors import UsageError
from rlkit.tools.scaffold import FILES, scaffold
from tests.limits import HANG_S


def test_the_project_has_an_environment_a_config_a_test_and_a_readme(tmp_path: Path) -> None:
    written = scaffold(tmp_path / "deep" / "largest")
    assert sorted(path.name for path in (tmp_path / "deep" / "largest").iterdir()) == sorted(FILES)
    assert sorted(path.name for path in written) == sorted(FILES)
    assert all("$" not in path.read_text() for path in written)


def test_its_tests_pass_at_once(tmp_path: Path) -> None:
    scaffold(tmp_path / "project")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=tmp_path / "project", capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_an_empty_folder_may_exist(tmp_path: Path) -> None:
    scaffold(tmp_path)
    assert (tmp_path / "env.py").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        scaffold(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".hidden"]


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        scaffold(tmp_path / "file")


@pytest.mark.parametrize(
    ("folder", "name"), [("my task", "my-task"), ("näme", "n-me"), ("---", "env"), ("v1.0", "v1.0"), ("2024", "2024")]
)
def test_the_folder_names_the_environment(tmp_path: Path, folder: str, name: str) -> None:
    scaffold(tmp_path / folder)
    assert [str(key) for key in yaml.safe_load((tmp_path / folder / "config.yaml").read_text())["envs"]] == [name]


@pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", "a\n", "ünï", "$name", "../up"])
def test_a_name_that_the_configuration_would_refuse_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        scaffold(tmp_path / "project", name=name)
    assert not (tmp_path / "project").exists()


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file/project cannot be created: Not a directory"):
        scaffold(tmp_path / "file" / "project")
