"""The folder of sandboxes, who owns which, and what those that were killed have left.

Invariant: the folder of a sandbox stands before anything else of it does, and goes last; a folder whose owner is gone
is removed with all that belongs to it when the next owner appears. The sandboxes of a living owner are never touched.

An owner is known by a lock that the kernel lets go of when it dies, so that a number that is used again, or another
container's, is no mistake.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from typing import TypedDict

from rlkit._util.paths import cache_dir
from rlkit.errors import MissingError
from rlkit.sandbox import cgroups

_RECORD = "belongs.json"
_LOCK = "lock"


def store() -> Path:
    """Where sandboxes and their layers are kept: `sandbox` in rlkit's cache."""
    return cache_dir() / "sandbox"


@dataclass(frozen=True)
class Process:
    """A process that no other can be taken for: a number is given again, a start time is not."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process of that number, if there is one."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        return cls(pid, text.rpartition(")")[2].split()[19])

    def kill(self) -> None:
        """End it, if it is still the same."""
        if Process.of(self.pid) == self:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


class SandboxFolder:
    """The folder of one sandbox, and the names of the layers that must not go while it stands."""

    def __init__(self, uses: tuple[str, ...]) -> None:
        self.name = f"rlkit-{os.getpid()}-{secrets.token_hex(5)}"
        with _making:  # one folder for the whole process, also where threads ask at once
            home = _owned(store())
        self.path = home / self.name
        self._uses = uses
        self._processes: tuple[Process, ...] = ()
        self._groups: tuple[Path, ...] = ()
        self.path.mkdir()
        self._write()

    def belongs(self, processes: tuple[int, ...], groups: tuple[Path, ...] = ()) -> None:
        """Write down what has to go with the sandbox."""
        self._processes += tuple(found for pid in processes if (found := Process.of(pid)))
        self._groups += groups
        self._write()

    def remove(self) -> None:
        """Remove the folder with all that belongs to it; its processes have ended, or are ended now."""
        _remove(self.path, self._processes, self._groups)

    def _write(self) -> None:
        record = {
            "processes": [[process.pid, process.started] for process in self._processes],
            "groups": [str(path) for path in self._groups],
            "uses": self._uses,
        }
        temporary = self.path / f"{_RECORD}.new"
        temporary.write_text(json.dumps(record))  # not flushed: a power cut ends the sandbox, and its folder is enough
        temporary.replace(self.path / _RECORD)


def fresh() -> Path:
    """A path for what is made here and then moved to where it stays, or moved here to go; it goes with this process."""
    with _making:
        return _owned(store()) / f"new-{secrets.token_hex(5)}"


def sweep() -> int:
    """Remove what owners that are gone have left; how many sandboxes that were."""
    swept = 0
    for owner in sorted(store().glob("live/*")):
        if not _is_gone(owner / _LOCK):
            continue
        for path in sorted(owner.glob("rlkit-*")):
            record = _record(path)
            processes = [Process(int(pid), started) for pid, started in record.get("processes", [])]
            _remove(path, processes, tuple(Path(group) for group in record.get("groups", [])))
            swept += 1
        remove_folder(owner)
    return swept


def layers_in_use() -> set[str]:
    """The names of the layers that sandboxes are made of."""
    return {name for path in store().glob("live/*/rlkit-*") for name in _record(path).get("uses", [])}


def _remove(path: Path, processes: Iterable[Process], groups: tuple[Path, ...]) -> None:
    for process in processes:
        process.kill()
    cgroups.remove(groups)
    remove_folder(path)


def remove_folder(path: Path) -> None:
    """Remove a folder of any depth, and with any permissions, that a sandbox has written.

    By the system's `rm`: Python's own gives up on folders that lie deeper than it may recurse.
    """
    if os.geteuid() != 0:
        subprocess.run(["chmod", "-R", "u+rwx", "--", str(path)], capture_output=True, check=False)
    subprocess.run(["rm", "-rf", "--one-file-system", "--", str(path)], capture_output=True, check=False)


class _Record(TypedDict, total=False):
    processes: list[tuple[int, str]]
    groups: list[str]
    uses: list[str]


def _record(path: Path) -> _Record:
    try:
        return json.loads((path / _RECORD).read_text())
    except (OSError, ValueError):  # its owner was killed before it had anything to write down
        return {}


@cache
def _owned(home: Path) -> Path:
    """The folder of this process's sandboxes, with the lock that says that it lives; what dead ones left goes."""
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    fresh = home / f"new-{name}"
    try:
        (home / "live").mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)
        fresh.mkdir()
        lock = os.open(fresh / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        fresh.rename(home / "live" / name)  # nobody sees it without its lock
    except OSError as error:
        raise MissingError(
            f"cannot write to {home} ({error.strerror}), where sandboxes are kept: set RLKIT_CACHE_DIR to a folder"
        ) from error
    _locks.append(lock)  # open for as long as the process lives
    atexit.register(_leave, home / "live" / name)
    sweep()
    return home / "live" / name


def _leave(folder: Path) -> None:
    if _locks and not list(folder.glob("rlkit-*")):  # what is left is for the next owner
        remove_folder(folder)


def _is_gone(lock: Path) -> bool:
    try:
        with FileIO(lock, "r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _let_go() -> None:
    """In a process that was forked: it owns nothing, and must not keep its parent's locks."""
    global _making  # noqa: PLW0603  a thread that this process does not have may hold it
    _making = threading.Lock()
    for lock in _locks:
        os.close(lock)
    _locks.clear()
    _owned.cache_clear()


_making = threading.Lock()
_locks: list[int] = []
os.register_at_fork(after_in_child=_let_go)
