"""The command of the README that installs rlkit and starts a run."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A program in the place of uv, which prints what uv 0.13 prints where there is no terminal.
FAKE_UV = """#!/bin/sh
echo 'Downloading torch (514.2MiB)' >&2
echo 'Downloading pygments (1024.0KiB)' >&2
echo ' Downloaded pygments' >&2
[ -e "$0.broken" ] && { echo 'error: no space left on device' >&2; exit 2; }
echo ' Downloaded torch' >&2
echo 'Installed 2 packages in 1.20s' >&2
echo ' + torch==2.12.0' >&2
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    programs = {".uv/bin/uv": FAKE_UV, ".venv/bin/rlkit": '#!/bin/sh\nprintf "rlkit <%s>\\n" "$@"; exit 3\n'}
    for name, program in programs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(program)
        path.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "first_run.py", tmp_path / "scripts")
    return tmp_path


def test_packages_are_installed_and_the_command_runs_with_its_exit_code(clone: Path) -> None:
    command = [sys.executable, clone / "scripts" / "first_run.py", "train", "a b.yaml"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "rlkit <train>\nrlkit <a b.yaml>\n")
    assert done.stderr == "Installed 2 packages in 1.20s\n"


def test_a_terminal_shows_the_downloads_on_one_line(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    main, terminal = pty.openpty()
    command = [sys.executable, clone / "scripts" / "first_run.py"]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=terminal)
    os.close(terminal)
    shown = os.read(main, 10_000).decode()
    os.close(main)
    assert "\x1b[2Kinstalling packages: 1 of 515\r" in shown  # cut to the width
    kept = [line.rpartition("\x1b[2K")[2] for line in shown.split("\r\n")]
    assert kept == ["Installed 2 packages in 1.20s", ""]


def test_a_failure_of_uv_is_printed_and_nothing_runs(clone: Path) -> None:
    (clone / ".uv" / "bin" / "uv.broken").touch()
    done = subprocess.run([sys.executable, clone / "scripts" / "first_run.py"], check=False, capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"error: no space left on device\nerror: uv could not install the packages; exit code 2\n" in done.stderr


@pytest.mark.slow
def test_a_clone_without_an_environment_gets_one(tmp_path: Path) -> None:
    for name in (".python-version", "pyproject.toml", "uv.lock", "README.md", "LICENSE", "scripts/first_run.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    python = Path(sys.base_prefix) / "bin" / "python3"  # with pip, which the environment of the tests lacks
    command = [python, tmp_path / "scripts" / "first_run.py", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "installing the packages of uv.lock, 6 GB on the disk\nInstalled " in done.stderr
    assert done.stdout.startswith("rlkit ")
