"""The lock of a run's directory.

Invariant: one process at a time writes to a run.
"""

from __future__ import annotations

from pathlib import Path

from rlkit._util import files
from rlkit._util.files.lock import LockFile, find_holder
from rlkit.errors import UsageError


def acquire_lock(directory: Path) -> LockFile:
    """Create and lock a run's directory, and return the file that releases the lock when it is closed.

    Raises:
        UsageError: another process holds the lock, or the directory cannot be written.
    """
    try:
        files.make_folder(directory)
        file = LockFile(directory / "lock")
        holder = file.acquire()
    except FileExistsError as error:
        raise UsageError(f"{directory} is a file, but a run needs a folder: choose another name (--name)") from error
    except OSError as error:
        remedy = "set RLKIT_RUNS_DIR to a writable folder"
        raise UsageError(f"cannot write to {directory}: {error.strerror}; {remedy}") from error
    if holder is not None:
        file.close()
        raise UsageError(f"another process is writing to {directory}: process {holder}")
    return file


def find_lock_holder(directory: Path) -> str | None:
    """Return the id of the process that holds the lock of a run's directory, or None if the lock is free."""
    return find_holder(directory / "lock")
