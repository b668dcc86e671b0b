from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.trackers.sinks import settings_of, sink
from rlkit.trackers.sync import send
from tests.trackers.folders import write_run, write_step


def test_a_run_is_in_the_database_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    directory, settings = write_run(tmp_path / "run"), settings_of("trackio", {"project": "sums"})
    send(directory, "trackio", sink("trackio", settings))
    write_step(directory, 4)
    send(directory, "trackio", sink("trackio", settings))
    logs = SQLiteStorage.get_logs("sums", "run")
    assert [(log["step"], log["env/sums/reward/mean"]) for log in logs] == [(n, n / 10) for n in range(5)]
    assert SQLiteStorage.get_runs("sums") == ["run"]
    config = SQLiteStorage.get_run_config("sums", "run")
    assert config is not None
    assert config["steps"] == 100
