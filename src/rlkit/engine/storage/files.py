"""Files of checkpoints and snapshots: JSON, and the lock of a folder.

Invariant: a reader of a JSON file sees the old or the new content, even if a process is killed at any time.
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
    """Return the content of a file, or None if the file is absent, damaged or of another kind."""
    try:
        return kind.validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None


def write_json(file: Path, value: object) -> None:
    """Replace a file and flush it to the disk; make its folder if missing."""
    files.write_text(file, json.dumps(value, indent=1))


@contextmanager
def hold_lock(folder: Path, mode: int) -> Generator[None]:
    """Hold the lock of a folder in a `mode` of `fcntl.flock`; make the folder if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, mode)
        yield
    finally:
        os.close(descriptor)
