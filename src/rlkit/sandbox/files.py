"""Files copied into and out of a sandbox.

Invariant: files from a sandbox are written only below the target folder, whatever their names and links are. No link
is followed, no copied link leads out of the folder, and no file keeps a set-user-id bit.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from rlkit.errors import EnvironmentFault
from rlkit.sandbox.context import Entry
from rlkit.sandbox.inside import job

_CHUNK_BYTES = 1 << 20

_MAX_ENTRIES = 200_000
"""Maximum number of files and folders in one copy out of a sandbox: each takes an inode and memory."""


class TransferTooLarge(EnvironmentFault):
    """A copy out of a sandbox exceeded its limit."""


class SourceMissing(EnvironmentFault):
    """A copy out of a sandbox has no source."""


def pack_entries(entries: list[Entry], stream: BinaryIO) -> None:
    """Write the entries of a COPY as a tar stream."""
    with job.open_archive(stream) as archive:
        for entry in entries:
            if entry.path is not None:
                job.add_entry(archive, str(entry.path), entry.name, mode=entry.mode)
                continue
            member = tarfile.TarInfo(entry.name)
            member.mode, member.size = entry.mode, len(entry.text.encode())
            archive.addfile(member, io.BytesIO(entry.text.encode()))


def unpack(stream: BinaryIO, target: Path, *, single: bool, max_bytes: int) -> None:
    """Write files from a sandbox below `target`, or a single file to `target`; raise TransferTooLarge over a limit."""
    left_bytes = max_bytes
    links: list[tuple[PurePosixPath, str]] = []
    top = os.open(target.parent if single else target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for count, member in enumerate(archive):
                if count == _MAX_ENTRIES:
                    raise TransferTooLarge(f"the copy out of the sandbox has more than {_MAX_ENTRIES} files")
                name = PurePosixPath(target.name if single else member.name)
                if name.is_absolute() or ".." in name.parts or not name.parts:
                    continue
                if member.isdir():
                    os.close(_open_folder(top, name))
                elif member.isreg():
                    left_bytes -= member.size
                    if left_bytes < 0:
                        raise TransferTooLarge(f"the copy out of the sandbox has more than {max_bytes} bytes")
                    content = archive.extractfile(member)
                    if content is not None:
                        _write(top, name, content, member.mode)
                elif member.issym() and _stays_inside(name, member.linkname):
                    links.append((name, member.linkname))
        while stream.read(_CHUNK_BYTES):  # the end of the archive is padded; its writer must not meet a closed pipe
            continue
        for name, link_target in links:
            # A folder of that name stays.
            with suppress(IsADirectoryError, FileExistsError), _open_parent(top, name) as folder:
                os.symlink(link_target, name.name, dir_fd=folder)
    finally:
        os.close(top)


def _stays_inside(name: PurePosixPath, link_target: str) -> bool:
    """Return whether a link cannot lead out: all `..` come first, and are fewer than the link's path components.

    A `..` after another component is rejected, because that component could be a link to a folder higher up.
    """
    parts = PurePosixPath(link_target).parts
    up = sum(1 for part in parts if part == "..")
    return not link_target.startswith("/") and parts[:up] == ("..",) * up and up < len(name.parts)


def _open_folder(top: int, name: PurePosixPath) -> int:
    """Open a folder below `top`; make missing folders, and replace anything on the path that is not a folder."""
    here = os.dup(top)
    for part in name.parts:
        with suppress(FileExistsError):
            os.mkdir(part, dir_fd=here)
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        except NotADirectoryError:  # also raised for a link
            os.unlink(part, dir_fd=here)
            os.mkdir(part, dir_fd=here)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


@contextmanager
def _open_parent(top: int, name: PurePosixPath) -> Generator[int]:
    """Open the folder of an entry below `top`, and remove an earlier file or link of that name."""
    folder = _open_folder(top, name.parent)
    try:
        with suppress(FileNotFoundError):
            os.unlink(name.name, dir_fd=folder)
        yield folder
    finally:
        os.close(folder)


def _write(top: int, name: PurePosixPath, content: IO[bytes], mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with _open_parent(top, name) as folder:
        file = os.fdopen(os.open(name.name, flags, 0o600, dir_fd=folder), "wb")
    with file:
        shutil.copyfileobj(content, file, _CHUNK_BYTES)
        os.fchmod(file.fileno(), stat.S_IMODE(mode) & 0o777 | 0o600)
