from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlkit.algorithms import datums
from tests.simulation import Simulation, Talk


@pytest.fixture
def run(tmp_path: Path) -> Path:
    simulation = Simulation(tmp_path / "runs" / "first", tasks=[Talk(number) for number in range(4)])
    simulation.train()
    return simulation.directory


def test_consistent_run_is_exit_code_0(rlkit: Callable[..., Any], run: Path) -> None:
    result = rlkit("audit", "first")
    assert result.exit_code == 0
    assert "in 72 turns of 18 episodes are trained on, each where it was sampled" in result.stdout
    report = json.loads(rlkit("audit", run, "--json").stdout)
    assert (report["ok"], report["envs"]["words"]["groups"], report["envs"]["words"]["cut_tokens"]) == (True, 6, 0)


def test_first_inconsistent_token_is_named(
    rlkit: Callable[..., Any], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datums, "_path", lambda episode, last: [last])  # forgets what was said before
    result = rlkit("audit", "first")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "error: step 1, words, task task-" in result.stderr
    assert "sequence 0: token" in result.stderr
    assert json.loads(rlkit("audit", "first", "--json").stdout)["ok"] is False


def test_missing_run_is_exit_code_2(rlkit: Callable[..., Any]) -> None:
    assert rlkit("audit", "nothing").exit_code == 2


_READER = """
import os, sys
from pathlib import Path
from rlkit.envs.math.table_files import read_rows
from rlkit.store import table
from rlkit.token_records.list_columns import read_columns
from rlkit.token_records.updates import read_update

episodes, update = map(Path, sys.argv[1:])
before = len(os.listdir("/proc/self/task"))
assert table.read_table(episodes) and read_columns(episodes) and read_update(update) and [*read_rows(episodes)]
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the threads of a process are listed in /proc")
def test_tables_of_a_run_are_read_without_threads(run: Path) -> None:
    """Arrow's threads abort a process that ends soon after: `terminate called without an active exception`."""
    episodes, update = next((run / "episodes").rglob("*.parquet")), next((run / "updates").glob("*.parquet"))
    done = subprocess.run([sys.executable, "-c", _READER, episodes, update], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
