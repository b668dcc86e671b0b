"""The lock of a run's directory.

Invariant: one process at a time holds the lock, and none that it forks does: the lock ends with its holder.
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
    """A file whose lock ends when it is closed, even while a process that is being started has a copy of it."""

    def close(self) -> None:
        if not self.closed:
            fcntl.flock(self, fcntl.LOCK_UN)
        super().close()


_open_locks = WeakSet[_Lock]()


def acquire_lock(directory: Path) -> FileIO:
    """Create a run's directory, lock it, and return the file that releases the lock when it is closed.

    Raises:
        UsageError: another process holds the lock, or the directory cannot be written.
    """
    try:
        files.make_folder(directory)
        file = _Lock(directory / "lock", "a+")
    except FileExistsError as error:
        raise UsageError(f"{directory} is a file, and a run needs a folder: choose another name (--name)") from error
    except OSError as error:
        remedy = "set RLKIT_RUNS_DIR to a folder that can"
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
    """Return the id of the process that holds the lock of a run's directory, or None."""
    try:
        with (directory / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return (directory / "lock").read_text(errors="replace").strip() or "of unknown number"
    return None


def _close_in_child() -> None:
    """Close the locks in a process that an environment forked, which would hold them for as long as it lives."""
    for file in list(_open_locks):
        FileIO.close(file)  # not unlocked: the lock is shared with the parent


os.register_at_fork(after_in_child=_close_in_child)
