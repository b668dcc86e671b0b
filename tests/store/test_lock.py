from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from rlkit.errors import UsageError
from rlkit.store import acquire_lock, find_lock_holder


def test_the_holder_is_named(tmp_path: Path) -> None:
    assert find_lock_holder(tmp_path / "none") is None
    with acquire_lock(tmp_path):
        assert find_lock_holder(tmp_path) == str(os.getpid())
        with pytest.raises(UsageError) as refused:
            acquire_lock(tmp_path)
    assert str(refused.value) == f"another process is writing to {tmp_path}: process {os.getpid()}"
    assert find_lock_holder(tmp_path) is None
    acquire_lock(tmp_path).close()


def test_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is a file, but a run needs a folder: choose another `name`"):
        acquire_lock(tmp_path / "file")
    with pytest.raises(UsageError, match=r"cannot write to .*; set RLKIT_RUNS_DIR to a writable folder"):
        acquire_lock(tmp_path / "file" / "run")


def test_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: object, operation: int) -> None:
        if operation != fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(UsageError, match=r"cannot write to .*: No locks available; set RLKIT_RUNS_DIR to"):
        acquire_lock(tmp_path / "run")
