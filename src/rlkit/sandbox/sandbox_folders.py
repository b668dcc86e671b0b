"""Folders of sandboxes and their owners; removal of sandboxes left by killed processes.

Invariant: the folder of a sandbox is made before all its other resources, and removed last. When a process makes its
first sandbox, it removes the sandboxes of dead owners with all their resources. Sandboxes of a living owner are never
touched.

An owner holds a lock that the kernel releases at its death, so reused process ids, and ids of other containers, are
not confused with it.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypedDict

from rlkit._util.files.lock import LockFile, find_holder
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
    """A process identified by id and start time, because ids are reused."""

    pid: int
    start_time: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process with this id; None if there is none."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        return cls(pid, text.rpartition(")")[2].split()[19])

    def kill(self) -> None:
        """Kill the process, unless its id now belongs to another process."""
        if Process.of(self.pid) == self:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


class SandboxFolder:
    """The folder of one sandbox, and the names of the layers to keep while it exists."""

    def __init__(self, uses: tuple[str, ...]) -> None:
        self.name = f"rlkit-{os.getpid()}-{secrets.token_hex(5)}"
        with _owner_lock:  # concurrent threads of a process share one owner folder
            owner_folder = _claim_owner_folder(store())
        self.path = owner_folder / self.name
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
        temporary.write_text(json.dumps(record))  # not flushed: after a power cut only the folder is left to remove
        temporary.replace(self.path / _RECORD)


def make_temporary_path() -> Path:
    """Return a temporary path for a folder before its move to the store or its removal; removed with this process."""
    with _owner_lock:
        return _claim_owner_folder(store()) / f"new-{secrets.token_hex(5)}"


def sweep() -> int:
    """Remove the sandboxes of dead owners; return the number of removed sandboxes."""
    removed = 0
    for owner in sorted(store().glob("live/*")):
        try:
            if find_holder(owner / _LOCK) is not None:
                continue
        except OSError:  # not accessible, so perhaps of a living owner
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
    """Remove a folder written by untrusted code, of any depth and with any permissions.

    Uses the system's `rm`: Python's `rmtree` fails beyond its recursion limit.
    """
    if os.geteuid() != 0 and not path.is_symlink():  # chmod would follow the link
        subprocess.run(["chmod", "-R", "u+rwx", "--", str(path)], capture_output=True, check=False)
    options = ["-rf", "--one-file-system"] if sys.platform == "linux" else ["-rf"]  # an option of GNU
    subprocess.run(["rm", *options, "--", str(path)], capture_output=True, check=False)


class _Record(TypedDict, total=False):
    processes: list[tuple[int, str]]
    groups: list[str]
    uses: list[str]


def _read_record(path: Path) -> _Record:
    try:
        return json.loads((path / _RECORD).read_text())
    except (OSError, ValueError):  # the owner was killed before it wrote the record
        return {}


@cache
def _claim_owner_folder(store_path: Path) -> Path:
    """Make the folder of this process's sandboxes, lock it, and sweep the sandboxes of dead owners."""
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    unlocked = store_path / f"new-{name}"
    try:
        (store_path / "live").mkdir(parents=True, exist_ok=True)
        store_path.chmod(0o700)
        unlocked.mkdir()
        lock = LockFile(unlocked / _LOCK)
        lock.acquire()
        unlocked.rename(store_path / "live" / name)  # last, so that it is never visible without its lock
    except OSError as error:
        raise MissingError(
            f"cannot write to the folder of sandboxes, {store_path} ({error.strerror}): set RLKIT_CACHE_DIR to a folder"
        ) from error
    atexit.register(_give_up_folder, store_path / "live" / name, lock)  # keeps the lock for the life of the process
    sweep()
    return store_path / "live" / name


def _give_up_folder(folder: Path, lock: LockFile) -> None:
    if not lock.closed and not list(folder.glob("rlkit-*")):  # otherwise the next owner removes the sandboxes
        remove_folder(folder)
    lock.close()


def _forget_owner() -> None:
    """Forget the parent's folder in a forked process, which owns no sandboxes; `LockFile` closes the lock there."""
    global _owner_lock  # noqa: PLW0603  the old lock may be held by a thread that does not exist here
    _owner_lock = threading.Lock()
    _claim_owner_folder.cache_clear()


_owner_lock = threading.Lock()
os.register_at_fork(after_in_child=_forget_owner)
