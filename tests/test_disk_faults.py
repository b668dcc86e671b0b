"""The N-th operation on a file fails, is slow, or coincides with cancellation: the run can be resumed."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import rlkit
from rlkit.testing import World
from tests.marks import split_slow

from .simulation import Simulation

EXHAUSTIVE = os.environ.get("RLKIT_TEST_EXHAUSTIVE") == "1"
SCHEDULES = {"sync": {}, "async": {"mode": "async", "max_staleness": 2, "staleness": "strict"}}
RUNS = 10
"""In each test; all there could be if exhaustive."""


class Disk:
    """Count the file operations of a run, and call `happens` before or after the `at`-th."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.directory = directory
        self.at = self.count = 0
        self.happens: Callable[[str], None] = lambda name: None
        self.after = False
        self._lock = threading.Lock()
        opened, replace, fsync, write_table = io.open, os.replace, os.fsync, pq.write_table

        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not self._mine(file) or not set(mode) & set("wax+"):
                return opened(file, mode, *args, **kwargs)
            return Written(self.run_operation("open", lambda: opened(file, mode, *args, **kwargs)), self)

        def write_table_(table: Any, where: Path, **kwargs: Any) -> None:
            self.run_operation("table", lambda: write_table(table, where, **kwargs))

        monkeypatch.setattr(io, "open", open_)  # pathlib's own
        monkeypatch.setattr(
            os, "replace", lambda source, target: self.run_operation("rename", lambda: replace(source, target))
        )
        monkeypatch.setattr(os, "fsync", lambda file: self.run_operation("fsync", lambda: fsync(file)))
        monkeypatch.setattr(pq, "write_table", write_table_)

    def arm(self, at: int, happens: Callable[[str], None], *, after: bool = False) -> None:
        """Restart the count."""
        self.at, self.happens, self.after, self.count = at, happens, after, 0

    def run_operation[T](self, name: str, operation: Callable[[], T]) -> T:
        """Count and run an operation."""
        with self._lock:
            self.count += 1
            mine = self.count == self.at
        if mine and not self.after:
            self.happens(name)
        result = operation()
        if mine and self.after:
            self.happens(name)
        return result

    def _mine(self, file: object) -> bool:
        return isinstance(file, str | Path) and str(file).startswith(str(self.directory))


class Written:
    """File that counts its writes."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file = file
        self._disk = disk

    def write(self, data: Any) -> int:
        def operation() -> int:
            return self._file.write(data)

        return self._disk.run_operation("write", operation)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def simulation(directory: Path, schedule: str) -> Simulation:
    settings = {"schedule": SCHEDULES[schedule], "steps": 2, "checkpoint": {"every": 1}}
    return Simulation(directory, World(), settings=settings)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch, tmp_path)


def moments(disk: Disk, run: Simulation) -> range:
    """Return operation numbers spread evenly over a run."""
    disk.arm(0, lambda name: None)
    run.train()
    assert disk.count > 40
    return range(1, disk.count + 1, 1 if EXHAUSTIVE else disk.count // RUNS)


def raising(number: int) -> Callable[[str], None]:
    def happens(name: str) -> None:
        raise OSError(number, os.strerror(number))

    return happens


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("error", split_slow(["ENOSPC", "EIO", "ETIMEDOUT"], lambda error: error == "ENOSPC"))
def test_run_reports_any_failed_file_operation_and_can_be_resumed(
    error: str, schedule: str, disk: Disk, tmp_path: Path
) -> None:
    number, failures = getattr(errno, error), 0
    expected = simulation(tmp_path / "whole", schedule)
    for operation in moments(disk, expected):
        run = simulation(tmp_path / f"{operation}", schedule)
        disk.arm(operation, raising(number))
        try:
            run.train()
        except (rlkit.RunFailed, rlkit.UsageError, OSError) as failure:
            assert os.strerror(number) in str(failure)
            failures += 1
        else:  # a checkpoint that was not written down was saved again, or what failed was the last of all
            assert len(run.lines()) == 2
        disk.arm(0, raising(number))
        run.train(resume=(run.directory / "run.json").exists())
        assert run.weights() == expected.weights(), operation
        assert not list(run.directory.rglob("*.tmp"))
    assert failures > RUNS // 2


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_run_cancelled_at_any_file_operation_can_be_resumed(
    after: bool, schedule: str, disk: Disk, tmp_path: Path
) -> None:
    expected = simulation(tmp_path / "whole", schedule)
    for operation in moments(disk, expected):
        run = simulation(tmp_path / f"{operation}", schedule)

        def cancel(name: str, run: Simulation = run) -> None:
            if run.cancel is not None:
                run.cancel()

        disk.arm(operation, cancel, after=after)
        try:
            run.train()
        except asyncio.CancelledError:
            disk.arm(0, cancel)
            run.train(resume=(run.directory / "run.json").exists())
        assert run.weights() == expected.weights(), operation


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hanging_disk_is_awaited(schedule: str, disk: Disk, tmp_path: Path) -> None:
    expected = simulation(tmp_path / "whole", schedule)
    for at in moments(disk, expected):
        run = simulation(tmp_path / f"{at}", schedule)
        disk.arm(at, lambda name: time.sleep(0.05))
        assert run.train().status == "completed"
        assert run.weights() == expected.weights(), at
