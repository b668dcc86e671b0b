"""Small files that last: replaced by one rename, flushed, and guarded by the lock of the folder that they are in.

Invariant: who reads such a file sees the old content or the new one, whatever is killed and whenever.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter

from rlkit._util import files


def read_json[T](file: Path, kind: TypeAdapter[T]) -> T | None:
    """What a file holds, or None if the file is absent, damaged or holds something else."""
    try:
        return kind.validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None


def write_json(file: Path, value: object) -> None:
    """Replace a file, on the disk when this returns; its folder is made if it is missing."""
    files.write_text(file, json.dumps(value, indent=1))
    sync(file.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(folder: Path, mode: int) -> int:
    """Lock a folder, which is made if it is missing; the descriptor that holds the lock until it is closed.

    Args:
        mode: as `fcntl.flock` takes it.

    Raises:
        BlockingIOError: `mode` does not wait, and somebody else holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(folder: Path, mode: int) -> Generator[None]:
    """Hold the lock of a folder for a while; arguments and errors as `lock`."""
    descriptor = lock(folder, mode)
    try:
        yield
    finally:
        os.close(descriptor)
