"""The lock of a run's directory.

Invariant: one process at a time holds it, and no process that this one forks does: the lock ends with its holder.
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
    """A file that is unlocked when it is closed, also while a program that is about to start has a copy of it."""

    def close(self) -> None:
        if not self.closed:
            fcntl.flock(self, fcntl.LOCK_UN)
        super().close()


_held = WeakSet[_Lock]()


def acquire_lock(directory: Path) -> FileIO:
    """Make a run's directory, take its lock, and return the file that releases it when it is closed.

    Raises:
        UsageError: another process holds it, or the directory cannot be written.
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
    _held.add(file)
    return file


def find_lock_holder(directory: Path) -> str | None:
    """Return the number of the process that holds the lock of a run's directory; None if nobody does."""
    try:
        with (directory / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # let go of at once
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return (directory / "lock").read_text(errors="replace").strip() or "of unknown number"
    return None


def _let_go() -> None:
    """In a process that an environment forked: it would hold the lock for as long as it lives, and it is no writer."""
    for file in list(_held):
        FileIO.close(file)  # to unlock it would be to unlock its parent's


os.register_at_fork(after_in_child=_let_go)
