"""Files that a reader never sees half written.

A whole file is written as a temporary neighbour, flushed to disk and renamed over the target; what is appended and
fails is taken back.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` so that it holds the old content or the new one, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # threads write one file at once, too
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` for UTF-8 text."""
    write_bytes(path, text.encode())


def append(file: BinaryIO, data: bytes) -> None:
    """Write all of `data` at the end of an unbuffered file, or nothing. It outlives the process, not a power cut."""
    before = file.tell()
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with suppress(OSError):
            file.truncate(before)
        raise
