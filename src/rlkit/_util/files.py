"""Files that a reader never sees half written.

Invariant: a whole file is the old one or the new one, and the new one for good once its writer has returned; what is
appended is there whole or, if that fails, taken back.
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
"""The numbers of the errors that room on the disk would mend."""


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` so that it holds the old content or the new one, also after a power cut.

    The new one if the power is cut after this has returned. Folders that are missing are made.
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
    """`write_bytes` for UTF-8 text."""
    write_bytes(path, text.encode())


def make_folder(path: Path) -> None:
    """Make a folder, and those that it is in, unless they are there; a power cut does not undo it."""
    made = list(takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Put on the disk which names a folder holds: a file that is flushed can still lose its own with the power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the answer of file systems that keep no names to be flushed
            raise
    finally:
        os.close(descriptor)


def append(file: BinaryIO, data: bytes) -> None:
    """Write all of `data` at the end of an unbuffered file, or nothing. It outlives the process, not a power cut."""
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with suppress(OSError):
            file.truncate(file.tell() - (len(data) - len(left)))  # asked only now: it is a system call
        raise
