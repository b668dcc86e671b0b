"""Virtual environments with the frameworks of others, in which rlkit is only on the path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
INSPECT = ("inspect-ai==0.3.285", "inspect-scout==0.6.1")
VERIFIERS = ("verifiers==0.4.0",)


def install(folder: Path, *packages: str) -> Path:
    """The interpreter of a new virtual environment with these packages and what they need, and nothing else."""
    paths = (os.environ.get("UV"), str(ROOT / ".uv" / "bin" / "uv"), shutil.which("uv"))  # `uv run` sets the first
    uv = next((path for path in paths if path and is_uv(path)), None)
    if uv is None:
        pytest.skip("there is no uv to install packages with")
    python = folder / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    command = [uv, "pip", "install", "--quiet", "--python", python, *packages]
    installed = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_S)
    if installed.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    return python


def is_uv(path: str) -> bool:
    """Whether a program is uv: a version manager's shim may stand there without one behind it."""
    try:
        return subprocess.run([path, "--version"], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def run_program(python: Path, program: str, *arguments: object, cwd: Path) -> dict[str, object]:
    """What a program of this folder prints as JSON on its last line."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MODEL_KEY": "none"}
    command = [python, Path(__file__).with_name(program), *map(str, arguments)]
    completed = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environ, cwd=cwd, timeout=HANG_S
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout.splitlines()[-1])
