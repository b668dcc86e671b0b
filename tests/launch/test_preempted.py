"""A job that is stopped and started again, with the very command of its specification."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from rlkit.launch.job import Job, make_restartable, make_spec
from tests.limits import HANG_S


def lines(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_a_job_that_is_preempted_and_started_again_goes_on_with_its_run(byte_model_dir: Path, tmp_path: Path) -> None:
    settings = ["envs.arithmetic.args.max_operand=9", f"model={byte_model_dir}", "steps=400", "checkpoint.every=0"]
    small = ["batch.groups=1", "batch.group_size=2", "sampling.max_tokens=2"]
    train = [sys.executable, "-m", "rlkit", "train", *settings, *small]
    (task,) = cast("list[dict[str, Any]]", make_spec(Job(command=make_restartable(train, name="mine")))["tasks"])
    command = [*task["command"], *task["arguments"]]
    environ = {**os.environ, "RLKIT_RUNS_DIR": str(tmp_path)}
    run = tmp_path / "mine"

    first = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(lines(run)) < 2 and first.poll() is None:
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    first.wait(HANG_S)
    before = lines(run)
    assert 2 <= len(before) < 400
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"

    again = [word if word != "steps=400" else f"steps={len(before) + 2}" for word in command]
    subprocess.run(again, env=environ, check=True, capture_output=True, timeout=HANG_S)
    assert lines(run) == list(range(1, len(before) + 3))
    assert json.loads((run / "run.json").read_text())["status"] == "completed"
