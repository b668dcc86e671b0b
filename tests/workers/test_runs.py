"""A whole run on the embedded engine has the same results with any number of workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rlkit.config import load_config
from rlkit.store import table
from rlkit.store.history import table_path
from rlkit.training.trainer import RLTrainer
from tests.workers.helpers import describe

TIMES = ("time/", "workers/", "usage/")
"""Beginnings of the names of metrics that depend on the machine."""

type Result = tuple[list[dict[str, float]], list[object]]


def run(model: Path, workers: int) -> Result:
    """Metrics of the steps, and the tokens and rewards of all episodes."""
    settings = {
        "model": str(model),
        "envs": {"arithmetic": {"env": "arithmetic"}},
        "batch": {"groups": 4, "group_size": 4},
        "sampling": {"max_tokens": 8},
        "steps": 2,
        "service": {"engine_threads": 1},
        "rollouts": {"workers": workers},
        "name": f"workers-{workers}",
    }
    result = asyncio.run(RLTrainer(load_config([], settings=settings), trackers=()).train())
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    groups = [record.group for step in (1, 2) for record in table.read_table(table_path(result.directory, step))]
    return (
        [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines],
        [(group.task, describe(group)) for group in sorted(groups, key=lambda group: group.draw)],
    )


@pytest.fixture(scope="module")
def result_here(byte_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLKIT_RUNS_DIR", str(tmp_path_factory.mktemp("runs")))
        return run(byte_model_dir, 0)


@pytest.mark.parametrize("workers", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_does_not_depend_on_its_workers(byte_model_dir: Path, result_here: Result, workers: int) -> None:
    metrics, groups = run(byte_model_dir, workers)
    assert metrics == result_here[0]
    assert groups == result_here[1]
    assert len(groups) == 8
