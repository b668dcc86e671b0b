"""The summary of a run is read from the ends of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.errors import UsageError
from rlkit.metrics.run_summary import find_ends, read_configuration, summarize_run
from tests.trackers.folders import add_metrics, write_run


def test_a_summary_has_the_first_and_the_latest_reward(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=0, settings={"steps": 5})
    assert (summarize_run(run)["step"], summarize_run(run)["steps"], summarize_run(run)["reward"]) == (0, 5, [None, 0])
    for step in (1, 2, 6):
        add_metrics(run, step)
    summary = summarize_run(run)
    assert (summary["name"], summary["status"], summary["reward"]) == ("run", "completed", [0, 0.6])
    assert (summary["step"], summary["steps"]) == (6, 6)  # it was resumed with fewer steps


def test_ends_are_those_of_the_known_values() -> None:
    assert find_ends([None, 1.0, 3.0, None, 2.0, None]) == [1.0, 2.0]
    assert find_ends([None, 1.0]) == [None, 1.0]
    assert find_ends([1.0, 1.0]) == [1.0, 1.0]
    assert find_ends([None]) is None


def test_only_a_damaged_configuration_leaves_a_summary(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_text("track:\n  wandb:\n    tags: [a: b: c]\n")
    summary = summarize_run(run)
    assert (summary["tags"], summary["reward"]) == ([], [0, 0.3])
    assert "track.wandb.tags" in summary["damaged"]
    assert read_configuration(run, Path.read_text, default="")[1] is None
    (run / "config.yaml").unlink()
    assert read_configuration(run, Path.read_text, default="none") == ("none", None)
    (run / "run.json").write_text("[]")
    with pytest.raises(UsageError, match=r"run\.json is damaged"):
        summarize_run(run)
