"""The lines that `rlkit train` prints at the end of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit.cli.train import _summary
from rlkit.trackers import RunResult


@pytest.mark.parametrize(
    ("scores", "is_noted"), [([0.5, 0.25, 0.375], True), ([0.5, 0.25, 0.5], False), ([0.5], False)]
)
def test_an_ending_says_if_no_evaluation_was_as_good_as_the_first(
    tmp_path: Path, scores: list[float], is_noted: bool
) -> None:
    lines = [json.dumps({"step": step, "eval/sums/reward/mean": score}) for step, score in enumerate(scores)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    text = _summary(RunResult("first", tmp_path, "completed", len(scores)))
    assert ("no later evaluation was as good as the first one, 0.50" in text) is is_noted


def test_an_ending_counts_the_rollouts_that_failed(tmp_path: Path) -> None:
    steps = [{"eval/all/failed": 2.0}, {"env/w/failed": 1.0, "eval/all/failed": 2.0}, {"env/w/failed": 0.0}]
    lines = [json.dumps({"step": step, **metrics}) for step, metrics in enumerate(steps)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    text = _summary(RunResult("first", tmp_path, "completed", 2))
    assert "failed        rollouts: 1 in training, 4 in evaluations\n" in text
    (tmp_path / "metrics.jsonl").write_text(lines[2] + "\n")
    assert "failed" not in _summary(RunResult("first", tmp_path, "completed", 2))
