"""Killed runs that are resumed train on exactly what they would have trained on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXHAUSTIVE = os.environ.get("RLKIT_TEST_EXHAUSTIVE") == "1"


def killed(root: Path, kills: int, what: str) -> dict[str, Any]:
    """What `tests.resume.killing` found; 50 kills if RLKIT_TEST_EXHAUSTIVE=1."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.resume.killing"]
    done = subprocess.run(
        [*command, str(root), str(50 if EXHAUSTIVE else kills), what],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"mode": "stream"},
        {"mode": "async", "max_staleness": 1, "staleness": "strict"},
        {"mode": "async", "max_staleness": 4, "staleness": "strict"},
    ],
    ids=["sync", "stream", "async1", "async4"],
)
def test_a_killed_run_trains_on_what_the_whole_one_did(schedule: dict[str, object], tmp_path: Path) -> None:
    found = killed(tmp_path / "runs", 4, json.dumps(schedule))
    whole = found["whole"]
    assert whole["weights"][-1] is not None
    for run in found["killed"]:
        assert run["trained"] == whole["trained"]
        assert run["weights"] == whole["weights"]  # the simulated weights remember all that they were trained on
        assert run["played twice"] == []
        assert run["samples"] - whole["samples"] <= run["lost"]  # only rollouts in flight are sampled again
        for line, expected in zip(run["metrics"], whole["metrics"], strict=True):
            if schedule.get("mode") != "async":  # there the weights that a rollout began with depend on timing
                assert line == pytest.approx(expected, rel=1e-12)
            assert line.get("service/loss:sum") == pytest.approx(expected.get("service/loss:sum"), rel=1e-12)


def test_a_paced_run_that_is_killed_loses_no_group_and_trains_none_twice(tmp_path: Path) -> None:
    found = killed(tmp_path / "runs", 4, json.dumps({"mode": "async", "max_staleness": 2}))
    for run in found["killed"]:
        assert run["played twice"] == []
        assert run["samples"] - found["whole"]["samples"] <= run["lost"] + 24  # which groups come last may differ
        taken = [(step, task) for step, rows in enumerate(run["trained"]) for task, _, _, _ in rows]
        assert len({task for _, task in taken}) == len(set(taken))  # no task is in two steps
        assert all(sum(counts for *_, counts in rows) == 12 for rows in run["trained"])


def test_a_run_on_the_engine_that_is_killed_gives_the_same_numbers(tmp_path: Path) -> None:
    found = killed(tmp_path / "runs", 3, "engine")
    for run in found["killed"]:
        assert run["played twice"] == []
        assert run["trained"] == found["whole"]["trained"]
        assert run["metrics"] == found["whole"]["metrics"]
