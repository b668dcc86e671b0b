"""The lock of a run's directory.

Invariant: one process at a time holds the lock. Forked children do not inherit it, so it ends with its holder.
"""

from __future__ import annotations

import fcntl
import os
from io import FileIO
from pathlib import Path
from weakref import WeakSet

from rlkit._util import files
from rlkit.errors import UsageError


class _Lock(FileIO):
    """Lock file that unlocks on close, even if a child between fork and exec has a copy of the descriptor."""

    def close(self) -> None:
        if not self.closed:
            fcntl.flock(self, fcntl.LOCK_UN)
        super().close()


_open_locks = WeakSet[_Lock]()


def acquire_lock(directory: Path) -> FileIO:
    """Create and lock a run's directory, and return the file that releases the lock when it is closed.

    Raises:
        UsageError: another process holds the lock, or the directory cannot be written.
    """
    try:
        files.make_folder(directory)
        file = _Lock(directory / "lock", "a+")
    except FileExistsError as error:
        raise UsageError(f"{directory} is a file, but a run needs a folder: choose another name (--name)") from error
    except OSError as error:
        remedy = "set RLKIT_RUNS_DIR to a writable folder"
        raise UsageError(f"cannot write to {directory}: {error.strerror}; {remedy}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().decode(errors="replace").strip() or "of unknown number"
        file.close()
        raise UsageError(f"another process is writing to {directory}: process {holder}") from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())
    _open_locks.add(file)
    return file


def find_lock_holder(directory: Path) -> str | None:
    """Return the id of the process that holds the lock of a run's directory, or None if the lock is free."""
    try:
        with (directory / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return (directory / "lock").read_text(errors="replace").strip() or "of unknown number"
    return None


def _close_in_child() -> None:
    """Close inherited locks in a forked child, which would otherwise keep them held."""
    for file in list(_open_locks):
        FileIO.close(file)  # without unlocking, because the parent shares the lock


os.register_at_fork(after_in_child=_close_in_child)
