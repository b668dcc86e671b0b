"""Detection of a lock that another process holds, without touching it."""

from __future__ import annotations

import os
from pathlib import Path

_LOCKS = Path("/proc/locks")


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock file, without taking the lock even for a moment.

    Where the system has no list of locks, the process whose number the file holds must be alive.
    """
    try:
        status = path.stat()
        device, place, holder = status.st_dev, f":{status.st_ino}", path.read_text().strip()
        if _LOCKS.exists():
            locks = [line.replace("-> ", "").split()[4:6] for line in _LOCKS.read_text().splitlines()]
            file = f"{os.major(device):02x}:{os.minor(device):02x}{place}"
            # Some file systems, such as btrfs, show another device here than in the status of a file.
            return any(name == file or (name.endswith(place) and process == holder) for process, name in locks)
        os.kill(int(holder), 0)
    except PermissionError:  # a process of another user
        return True
    except (OSError, ValueError):
        return False
    return True
