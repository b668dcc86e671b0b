"""The wheel, installed alone in a fresh environment, far from the repository: the first hour of a user."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UV = next(filter(None, (os.environ.get("UV"), shutil.which("uv"))), str(ROOT / ".uv" / "bin" / "uv"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path(UV).is_file(), reason="uv is not installed")]

type Command = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution."""
    place = tmp_path_factory.mktemp("dist")
    subprocess.run([UV, "build", "--quiet", "--out-dir", place, ROOT], check=True, capture_output=True)
    (built,) = place.glob("*.whl")
    assert len(list(place.glob("*.tar.gz"))) == 1
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs the command of an environment that holds the wheel and the locked dependencies; returns its stdout."""
    place = tmp_path_factory.mktemp("elsewhere")
    export = [UV, "export", "--frozen", "--no-dev", "--no-hashes", "--no-emit-project", "--quiet"]
    (place / "requirements.txt").write_bytes(subprocess.run(export, cwd=ROOT, check=True, capture_output=True).stdout)
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, place / "venv"], check=True)
    install = [UV, "pip", "install", "--quiet", "-r", place / "requirements.txt", wheel]
    subprocess.run(install, check=True, env={**os.environ, "VIRTUAL_ENV": str(place / "venv")})
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ["RLKIT_RUNS_DIR"] = str(place / "runs")

    def run(*arguments: str | Path, folder: str = ".") -> str:
        command = [place / "venv" / "bin" / "rlkit", *arguments]
        done = subprocess.run(command, cwd=place / folder, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_wheel_holds_the_package_and_what_it_reads(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.startswith("rlkit_tinker-")
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"rlkit", "rlkit_tinker"}
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "rlkit").rglob("*") if path.is_file()}
    assert {name for name in sources if "__pycache__" not in name} <= set(names)


def test_the_source_distribution_installs_the_same_files(wheel: Path, tmp_path: Path) -> None:
    (source,) = wheel.parent.glob("*.tar.gz")
    install = [UV, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", tmp_path, source]
    subprocess.run(install, check=True)
    archive = zipfile.ZipFile(wheel)
    names = [name for name in archive.namelist() if name.startswith("rlkit/")]
    assert len(names) > 500
    for name in names:
        assert (tmp_path / name).read_bytes() == archive.read(name)


def test_the_description_on_the_index_has_no_link_into_the_repository(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert "\n# rlkit\n" in metadata
    assert "CONTRIBUTING.md says how" in metadata
    assert {link[:8] for link in re.findall(r"\]\(([^)]*)", metadata)} == {"https://"}


def test_a_user_of_the_wheel_trains_evaluates_checks_and_looks(
    installed: Command, byte_model_dir: Path, tmp_path: Path
) -> None:
    assert installed("--version").startswith("rlkit 0.")
    installed("init", "mine")
    small = [f"model={byte_model_dir}", "lora.rank=2", "batch.groups=1", "batch.group_size=2", "sampling.max_tokens=4"]
    trained = installed("train", "config.yaml", *small, "steps=1", "eval=null", "--name", "first", folder="mine")
    assert trained.startswith("completed: ")
    installed("eval", "config.yaml", *small, folder="mine")
    installed("check", "config.yaml", folder="mine")
    page = tmp_path / "page.html"
    installed("view", "first", "--html", page, folder="mine")
    assert "first" in page.read_text()
    assert "another library of this name" not in installed("doctor", "--no-engine")
