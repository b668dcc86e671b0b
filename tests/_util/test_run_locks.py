"""A run whose process runs here is locked; one on a shared file system may be locked by another machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlkit._util.files import run_locks
from rlkit._util.files.run_locks import is_locked
from rlkit.store import acquire_lock

NOW_S = 1_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose process has ended; its last write was nine minutes ago."""
    acquire_lock(tmp_path / "run").close()
    for name in ("lock", "metrics.jsonl", "journal/000001.log", "journal/000002.log"):
        path = tmp_path / "run" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, times=(0, NOW_S - 540.0 if name.endswith("2.log") else NOW_S - 5000.0))
    return tmp_path / "run"


def make_mounts(path: Path, kind: str) -> str:
    """Return the system's list of file systems, with one of a kind at the device of a path."""
    device = path.stat().st_dev
    mount = f"40 1 {os.major(device)}:{os.minor(device)} / /runs rw shared:1 - {kind} host:/export rw\n"
    return f"23 27 0:22 / /sys rw - sysfs sysfs rw\n{mount}"


@pytest.fixture
def mounts(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's list of file systems; one that several machines share holds the run."""
    path = tmp_path / "mountinfo"
    path.write_text(make_mounts(run, "nfs4"))
    monkeypatch.setattr(run_locks, "_MOUNTS", path)
    return path


def test_a_run_on_a_shared_file_system_lives_for_ten_minutes_after_its_last_write(run: Path, mounts: Path) -> None:
    assert is_locked(run / "lock", clock=lambda: NOW_S)
    assert not is_locked(run / "lock", clock=lambda: NOW_S + 61.0)
    os.utime(run / "metrics.jsonl", times=(0, NOW_S))
    assert is_locked(run / "lock", clock=lambda: NOW_S + 61.0)


def test_a_run_on_a_file_system_of_this_machine_lives_as_long_as_its_lock(run: Path, mounts: Path) -> None:
    mounts.write_text(make_mounts(run, "ext4"))
    assert not is_locked(run / "lock", clock=lambda: NOW_S)
    lock = acquire_lock(run)
    assert is_locked(run / "lock", clock=lambda: NOW_S + 5000.0)
    lock.close()
    assert not is_locked(run / "lock", clock=lambda: NOW_S)


def test_a_run_without_a_lock_file_is_not_locked(tmp_path: Path, mounts: Path) -> None:
    assert not is_locked(tmp_path / "lock")
