"""Lock files, which processes hold one at a time.

Invariant: one process at a time holds a lock. Forked children do not inherit it, so it ends with its holder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from weakref import WeakSet

from rlkit._util.files import make_folder


class LockFile(FileIO):
    """An open lock file, created if missing; its text is the id of the process that locked it last.

    Closing the file unlocks it, even if a child between fork and exec has a copy of the descriptor.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a+")

    def acquire(self) -> str | None:
        """Lock the file for this process, or return the id of the process that holds it; do not wait."""
        try:
            fcntl.flock(self, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.seek(0)
            return _holder(self.read().decode(errors="replace"))
        except OSError:  # a file system without locks
            super().close()
            raise
        self.truncate(0)
        self.write(f"{os.getpid()}\n".encode())
        _open_locks.add(self)
        return None

    def close(self) -> None:
        """Unlock and close the file."""
        if not self.closed:
            fcntl.flock(self, fcntl.LOCK_UN)
        super().close()


_open_locks = WeakSet[LockFile]()


@contextmanager
def wait_for_lock(path: Path, on_wait: Callable[[], object]) -> Generator[None]:
    """Hold a lock file; call `on_wait` once if another process holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        acquisition = lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        acquisition = lock.acquire()
    with acquisition:
        yield


def make_once(path: Path, make: Callable[[Path], object], *, on_wait: Callable[[], object] = lambda: None) -> Path:
    """Return a file or folder, which the first process makes while others wait for it; it appears when complete.

    Args:
        make: makes it at another path; what a killed process left there is gone.
        on_wait: called if another process is making it.
    """
    if not _has_content(path):
        make_folder(path.parent)
        with wait_for_lock(path.with_suffix(".lock"), on_wait):
            if not _has_content(path):
                unfinished = path.with_suffix(".unfinished")
                try:
                    _remove(unfinished)
                    make(unfinished)
                    unfinished.replace(path)
                finally:
                    _remove(unfinished)
    return path


def _has_content(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def find_holder(path: Path) -> str | None:
    """Return the id of the process that holds a lock file, or None if no process does."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return _holder(path.read_text(errors="replace"))
    return None


def _holder(text: str) -> str:
    return text.strip() or "of unknown number"


def _close_in_child() -> None:
    """Close inherited locks in a forked child, which would otherwise keep them held."""
    for file in list(_open_locks):
        FileIO.close(file)  # without unlocking, because the parent shares the lock


os.register_at_fork(after_in_child=_close_in_child)
