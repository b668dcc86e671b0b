"""A tracker that is no part of the package: the example of docs/extending.md, in a package of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trackers.folders import write_run

EXAMPLE = re.compile(r"^#+ Add a tracker\n.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = Path(__file__).parents[2] / "docs" / "extending.md"

type Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def rlkit(tmp_path: Path) -> Command:
    """`rlkit` where a package with the tracker is installed."""
    example = EXAMPLE.search(PAGE.read_text())
    assert example is not None
    site, about = tmp_path / "site", tmp_path / "site" / "spreadsheets-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "spreadsheets.py").write_text(example[1])
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: spreadsheets\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[rlkit.trackers]\nrewards_csv = spreadsheets:RewardsCsvTracker\n")
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": paths, "RLKIT_RUNS_DIR": str(tmp_path / "runs")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlkit", *arguments]
        return subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_a_finished_run_is_sent_to_a_tracker_of_another_package(rlkit: Command, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    done = rlkit("sync", str(directory), "--to", "rewards_csv", "file=sums.csv")
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in (directory / "sums.csv").read_text().splitlines()] == ["0", "1", "2", "3"]
    wrong = rlkit("sync", str(directory), "--to", "rewards_csv", "fil=sums.csv")
    assert wrong.returncode == 2
    assert "track.rewards_csv.fil: " in wrong.stderr
    assert "Did you mean 'file'?" in wrong.stderr


@pytest.mark.slow
def test_a_run_is_shown_by_a_tracker_of_another_package(rlkit: Command, tmp_path: Path, byte_model_dir: Path) -> None:
    settings = ["envs.arithmetic={}", "steps=2", "batch.groups=2", "batch.group_size=2", "sampling.max_tokens=4"]
    done = rlkit("train", f"model={byte_model_dir}", *settings, "name=shown", "track.rewards_csv={}")
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "runs" / "shown" / "rewards.csv").read_text()
    assert [line.split(",")[0] for line in table.splitlines()] == ["1", "2"]


def test_a_tracker_that_cannot_be_loaded_is_named(rlkit: Command, tmp_path: Path) -> None:
    (tmp_path / "site" / "spreadsheets.py").write_text("import nothing_like_it\n")
    done = rlkit("config", "show", "envs.arithmetic={}", "track.rewards_csv={}")
    assert done.returncode == 3
    assert "the tracker rewards_csv, spreadsheets:RewardsCsvTracker, cannot be loaded" in done.stderr
