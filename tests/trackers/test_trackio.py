from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from rlkit.trackers.from_config import load_service
from rlkit.trackers.sync import send
from tests.trackers.folders import write_run, write_step


def test_a_run_is_in_the_database_of_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    project = f"sums-{uuid4().hex}"
    directory, settings = write_run(tmp_path / "run"), {"project": project}
    send(directory, load_service("trackio", settings))
    write_step(directory, 4)
    send(directory, load_service("trackio", settings))
    logs = SQLiteStorage.get_logs(project, "run")
    assert [(log["step"], log["env/sums/reward/mean"]) for log in logs] == [(n, n / 10) for n in range(5)]
    assert SQLiteStorage.get_runs(project) == ["run"]
    config = SQLiteStorage.get_run_config(project, "run")
    assert config is not None
    assert config["steps"] == 100
