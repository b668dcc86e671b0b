"""Files that a reader never sees half written.

Invariant: a replaced file is the old one or the new one, and durably the new one once its writer has returned; data is
appended completely or, if that fails, removed again.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Numbers of the errors that free space on the disk would fix."""


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one operation, and create missing folders.

    After a power cut it holds the old content or the new one; the new one if this has returned.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # threads write one file at once, too
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text as `write_bytes` does."""
    write_bytes(path, text.encode())


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, so that a power cut does not undo it."""
    missing = list(takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Put the entries of a folder on the disk: a power cut can take the name of a flushed file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def append(file: BinaryIO, data: bytes) -> None:
    """Append all of `data` to an unbuffered file, or nothing. It outlives the process, not a power cut."""
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with suppress(OSError):
            file.truncate(file.tell() - (len(data) - len(left)))  # tell() is a system call, so only now
        raise
