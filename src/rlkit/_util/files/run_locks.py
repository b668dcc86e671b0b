"""Detection of the process of a run, which holds the run's lock, without touching the lock.

Invariant: no lock is taken, even for a moment. A run on a file system of several machines may have its process on
another one, whose locks are not known here; it counts as running for ten minutes after its last write.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_LOCKS, _MOUNTS = Path("/proc/locks"), Path("/proc/self/mountinfo")
_SHARED = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs", "gpfs", "lustre", "nfs", "smb", "virtiofs")
"""Beginnings of the kinds of file systems that several machines may use."""

LIVE_S = 600.0
"""Time after the last write until a run whose process is not known counts as ended."""


def is_locked(path: Path, *, clock: Callable[[], float] = time.time) -> bool:
    """Return whether a process holds the lock file of a run.

    Where the system has no list of locks, the process whose number the file holds must be alive.
    """
    try:
        status, holder = path.stat(), path.read_text().strip()
        if not _LOCKS.exists():
            os.kill(int(holder), 0)
            return True
        return _is_listed(status, holder) or (_is_shared(status) and clock() - _last_write(path.parent) < LIVE_S)
    except PermissionError:  # a process of another user
        return True
    except (OSError, ValueError):
        return False


def _is_listed(status: os.stat_result, holder: str) -> bool:
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    locks = [line.replace("-> ", "").split()[4:6] for line in _LOCKS.read_text().splitlines()]
    # Some file systems, such as btrfs, show another device here than in the status of a file.
    return any(name == file or (name.endswith(f":{status.st_ino}") and pid == holder) for pid, name in locks)


def _is_shared(status: os.stat_result) -> bool:
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    mounts = [line.partition(" - ") for line in _MOUNTS.read_text().splitlines()]
    return any(place.split()[2] == device and kind.startswith(_SHARED) for place, _, kind in mounts)


def _last_write(run: Path) -> float:
    newest_segments = sorted(run.glob("journal/*"))[-1:]
    return max(path.stat().st_mtime for path in (run / "lock", *run.glob("metrics.jsonl"), *newest_segments))
