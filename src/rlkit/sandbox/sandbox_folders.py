"""Folders of sandboxes, their owners, and removal of those that killed processes have left.

Invariant: the folder of a sandbox is made before anything else of it, and removed last; a folder whose owner has died
is removed with all its resources when the next owner appears. The sandboxes of a living owner are never touched.

An owner holds a lock that the kernel releases at its death, so that a process id that is used again, or one of another
container, causes no mistake.
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
    """Return the folder of sandboxes and their layers: `sandbox` in rlkit's cache."""
    return cache_dir() / "sandbox"


@dataclass(frozen=True)
class Process:
    """A process identified by id and start time, since an id can be used again."""

    pid: int
    start_time: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process with an id, if there is one."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        return cls(pid, text.rpartition(")")[2].split()[19])

    def kill(self) -> None:
        """Kill the process, unless its id now belongs to another."""
        if Process.of(self.pid) == self:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


class SandboxFolder:
    """The folder of one sandbox, and the names of the layers to keep while it exists."""

    def __init__(self, uses: tuple[str, ...]) -> None:
        self.name = f"rlkit-{os.getpid()}-{secrets.token_hex(5)}"
        with _making:  # one folder for the whole process, also with concurrent threads
            home = _claim_owner_folder(store())
        self.path = home / self.name
        self._uses = uses
        self._processes: tuple[Process, ...] = ()
        self._groups: tuple[Path, ...] = ()
        self.path.mkdir()
        self._write()

    def add_resources(self, pids: tuple[int, ...], groups: tuple[Path, ...] = ()) -> None:
        """Record processes and control groups to remove with the sandbox."""
        self._processes += tuple(process for pid in pids if (process := Process.of(pid)))
        self._groups += groups
        self._write()

    def remove(self) -> None:
        """Remove the folder, its processes and its control groups."""
        _remove(self.path, self._processes, self._groups)

    def _write(self) -> None:
        record = {
            "processes": [[process.pid, process.start_time] for process in self._processes],
            "groups": [str(path) for path in self._groups],
            "uses": self._uses,
        }
        temporary = self.path / f"{_RECORD}.new"
        temporary.write_text(json.dumps(record))  # not flushed: after a power cut the folder is enough
        temporary.replace(self.path / _RECORD)


def make_temporary_path() -> Path:
    """Return a path for a folder before its move to the store, or before its removal; removed with this process."""
    with _making:
        return _claim_owner_folder(store()) / f"new-{secrets.token_hex(5)}"


def sweep() -> int:
    """Remove the sandboxes of dead owners, and return their number."""
    removed = 0
    for owner in sorted(store().glob("live/*")):
        if not _is_released(owner / _LOCK):
            continue
        for path in sorted(owner.glob("rlkit-*")):
            record = _read_record(path)
            processes = [Process(int(pid), start_time) for pid, start_time in record.get("processes", [])]
            _remove(path, processes, tuple(Path(group) for group in record.get("groups", [])))
            removed += 1
        remove_folder(owner)
    return removed


def list_layers_in_use() -> set[str]:
    """Return the names of the layers that sandboxes use."""
    return {name for path in store().glob("live/*/rlkit-*") for name in _read_record(path).get("uses", [])}


def _remove(path: Path, processes: Iterable[Process], groups: tuple[Path, ...]) -> None:
    for process in processes:
        process.kill()
    cgroups.remove(groups)
    remove_folder(path)


def remove_folder(path: Path) -> None:
    """Remove a folder that a sandbox has written, of any depth and with any permissions.

    Uses the system's `rm`: Python's `rmtree` fails beyond its recursion limit.
    """
    if os.geteuid() != 0:
        subprocess.run(["chmod", "-R", "u+rwx", "--", str(path)], capture_output=True, check=False)
    subprocess.run(["rm", "-rf", "--one-file-system", "--", str(path)], capture_output=True, check=False)


class _Record(TypedDict, total=False):
    processes: list[tuple[int, str]]
    groups: list[str]
    uses: list[str]


def _read_record(path: Path) -> _Record:
    try:
        return json.loads((path / _RECORD).read_text())
    except (OSError, ValueError):  # its owner was killed before it wrote the record
        return {}


@cache
def _claim_owner_folder(home: Path) -> Path:
    """Make the folder of this process's sandboxes, lock it, and sweep the sandboxes of dead owners."""
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    unlocked = home / f"new-{name}"
    try:
        (home / "live").mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)
        unlocked.mkdir()
        lock = os.open(unlocked / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(home / "live" / name)  # so that it is never visible without its lock
    except OSError as error:
        raise MissingError(
            f"cannot write to {home} ({error.strerror}), where sandboxes are kept: set RLKIT_CACHE_DIR to a folder"
        ) from error
    _locks.append(lock)  # open for as long as the process lives
    atexit.register(_remove_if_empty, home / "live" / name)
    sweep()
    return home / "live" / name


def _remove_if_empty(folder: Path) -> None:
    if _locks and not list(folder.glob("rlkit-*")):  # the next owner removes remaining sandboxes
        remove_folder(folder)


def _is_released(lock: Path) -> bool:
    try:
        with FileIO(lock, "r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _release_after_fork() -> None:
    """Release the parent's locks in a forked process, which owns no sandboxes."""
    global _making  # noqa: PLW0603  a thread that this process lacks may hold it
    _making = threading.Lock()
    for lock in _locks:
        os.close(lock)
    _locks.clear()
    _claim_owner_folder.cache_clear()


_making = threading.Lock()
_locks: list[int] = []
os.register_at_fork(after_in_child=_release_after_fork)
