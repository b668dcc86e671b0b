"""The example from end to end, with a policy that proposes programs from a list."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest

from rlkit.envs.discovery.problems.erdos import Erdos
from rlkit.envs.discovery.records import read_records
from rlkit.sandbox.inside import landlock, program_filter
from tests.limits import HANG_S

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's protection is Linux's"),
    pytest.mark.skipif(
        not landlock.version() or program_filter.program() is None, reason="programs would not be kept apart"
    ),
]


def playing(directory: Path, steps: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.envs.discovery.playing", str(directory), str(steps), *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, output


def best_by_step(directory: Path) -> list[float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["env/erdos/tasks/best"] for line in lines]


def steps_of(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
def test_the_archive_improves_survives_a_kill_and_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    folder = directory / "artefacts" / "erdos"
    process = playing(directory, 400)
    while len(list(folder.glob("*.record.json"))) < 2 or steps_of(directory) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.kill()
    process.communicate()
    before = read_records(folder)
    steps = steps_of(directory) + 3
    finished(playing(directory, steps, "--resume"))
    after = read_records(folder)
    assert {record.name for record in before} <= {record.name for record in after}  # no record is lost
    values = [record.value for record in after]
    assert values == sorted(values)
    best = best_by_step(directory)
    assert len(best) == steps >= 6
    assert best == sorted(best, reverse=True)  # it only ever improves
    assert values[0] < values[-1], "several records, each better than the one before"
    assert best[-1] == pytest.approx(after[0].value, abs=1e-12)
    for record in after:
        verified = Erdos().verify(record.construction)
        assert verified.value == record.value
        assert Erdos().certificate(verified.construction) == record.certificate
        assert "def run(seed, budget_s):" in record.program


@pytest.mark.slow
def test_the_reward_of_a_run_is_counted_once(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    finished(playing(directory, 2))
    rows = cast("list[dict[str, Any]]", pd.read_parquet(directory / "episodes").to_dict("records"))
    assert len(rows) == 16
    for row in rows:
        metrics = json.loads(row["metrics"])
        expected = 1 / metrics["value"] if metrics["valid"] else 0
        assert row["reward"] == expected
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows]
    assert sum(line["env/erdos/reward/mean"] for line in lines) / 2 == pytest.approx(sum(rewards) / 16)
