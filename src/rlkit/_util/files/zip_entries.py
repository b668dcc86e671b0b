"""Entries of a zip archive, stored or compressed with deflate or Zstandard.

Invariant: no entry is unpacked past its limit, and a damaged archive is a `UsageError` that names it.
"""

from __future__ import annotations

import zlib
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from zstandard import ZstdDecompressor, ZstdError

from rlkit.errors import UsageError

_ZSTANDARD = 93
"""Compression method that `zipfile` does not support before Python 3.14."""

_FAULTS = (OSError, EOFError, KeyError, OverflowError, RuntimeError, BadZipFile, zlib.error, ZstdError)


def list_entries(path: Path) -> set[str]:
    """Return the names of the entries."""
    try:
        with ZipFile(path) as archive:
            return set(archive.namelist())
    except _FAULTS as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def read_entry(path: Path, name: str, *, max_bytes: int) -> bytes:
    """Return the content of an entry; raise `UsageError` if it is damaged or has more than `max_bytes`."""
    try:
        with path.open("rb") as file, ZipFile(file) as archive:
            entry = archive.getinfo(name)
            if entry.compress_type == _ZSTANDARD:
                file.seek(entry.header_offset + 26)
                lengths = file.read(4)  # of the name and of the extra field, which precede the data
                file.seek(int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little"), 1)
                packed = BytesIO(file.read(entry.compress_size))
                unpacked = ZstdDecompressor().stream_reader(packed, read_across_frames=True)
            else:
                unpacked = archive.open(entry)
            data = unpacked.read(max_bytes + 1)
    except _FAULTS as error:
        raise UsageError(f"{path} is damaged: {name}: {error}") from error
    if len(data) > max_bytes:
        raise UsageError(f"{path} is damaged: {name}: it has more than {max_bytes:,} bytes")
    return data
