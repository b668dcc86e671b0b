"""Atomic writes of files.

Invariant: a reader sees the old or the new content of a replaced file. The new content is durable once the writing
function returns. A failed append is rolled back.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from rlkit.errors import RunFailed

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk or an exhausted quota."""


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of `path` atomically, and create missing folders.

    After a power failure, the file has the old or the new content; the new content if this function has returned.
    """
    make_folder(path.parent)
    # A unique name, because threads may write the same file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text with `write_bytes`."""
    write_bytes(path, text.encode())


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents durably."""
    missing = list(takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))
    if missing:
        path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk: a power failure can lose the name of a flushed file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def append(file: BinaryIO, data: bytes) -> None:
    """Append all of `data` to an unbuffered file, or nothing. The data survives the process, not a power failure."""
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with suppress(OSError):
            file.truncate(file.tell() - (len(data) - len(left)))  # only on errors, because tell() is a system call
        raise


def make_write_error(folder: Path, error: OSError) -> RunFailed:
    """Return the error for a run that cannot write to a folder."""
    remedy = "; make room, then resume the run" if error.errno in FULL else ""
    return RunFailed(f"cannot write to {folder}: {error.strerror or error}{remedy}")


@contextmanager
def report_write_errors(folder: Path) -> Generator[None]:
    """Turn an `OSError` inside into a `RunFailed` that names the folder."""
    try:
        yield
    except OSError as error:
        raise make_write_error(folder, error) from error
