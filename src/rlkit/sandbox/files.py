"""Files on their way into a sandbox and out of it.

Invariant: what comes out of a sandbox is written below the folder that was asked for and nowhere else, whatever its
names and links say: no link is followed, none leads out of the folder, and nothing keeps a set-user-id bit.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, NoReturn

from rlkit.errors import EnvironmentFault
from rlkit.sandbox.context import Entry

_CHUNK_BYTES = 1 << 20

_MOST_ENTRIES = 200_000
"""Files and folders that come out of a sandbox at one time: each takes an inode and memory, however small it is."""


class TooMuch(EnvironmentFault):
    """More came out of a sandbox than was to be taken."""


def pack(source: Path, stream: BinaryIO) -> None:
    """Write a file, or what is in a folder, as a tar stream that belongs to the sandbox's root."""
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        if not source.is_dir():
            _add(archive, source.resolve(), source.name)
            return
        for folder, folders, names in os.walk(source, onerror=_raise):
            folders.sort()
            for name in sorted([*folders, *names]):
                path = Path(folder) / name
                _add(archive, path, path.relative_to(source).as_posix())


def pack_entries(entries: list[Entry], stream: BinaryIO) -> None:
    """Write what a Dockerfile copies as a tar stream."""
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for entry in entries:
            if entry.path is not None:
                _add(archive, entry.path, entry.name, mode=entry.mode)
                continue
            member = tarfile.TarInfo(entry.name)
            member.mode, member.size = entry.mode, len(entry.text.encode())
            archive.addfile(member, io.BytesIO(entry.text.encode()))


def _raise(error: OSError) -> NoReturn:
    raise error


def _add(archive: tarfile.TarFile, path: Path, name: str, *, mode: int | None = None) -> None:
    """Write a file, a folder without what is in it, or a link; nothing else goes into a sandbox."""
    kind = path.lstat().st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind)):
        return
    member = archive.gettarinfo(path, name)
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = member.mode if mode is None else mode
    if not stat.S_ISREG(kind):
        archive.addfile(member)
        return
    # a second name of a file is a file, too: who reads a stream cannot go back to the first
    member.type, member.linkname, member.size = tarfile.REGTYPE, "", path.stat().st_size
    with path.open("rb") as file:
        archive.addfile(member, file)


def unpack(stream: BinaryIO, target: Path, *, single: bool, most_bytes: int) -> None:
    """Write what came out of a sandbox below `target`, or to it as a single file; raise TooMuch beyond a limit."""
    left = most_bytes
    links: list[tuple[PurePosixPath, str]] = []
    top = os.open(target.parent if single else target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for count, member in enumerate(archive):
                if count == _MOST_ENTRIES:
                    raise TooMuch(f"more than {_MOST_ENTRIES} files came out of the sandbox")
                name = PurePosixPath(target.name if single else member.name)
                if name.is_absolute() or ".." in name.parts or not name.parts:
                    continue
                if member.isdir():
                    os.close(_folder(top, name))
                elif member.isreg():
                    left -= member.size
                    if left < 0:
                        raise TooMuch(f"more than {most_bytes} bytes came out of the sandbox")
                    content = archive.extractfile(member)
                    if content is not None:
                        _write(top, name, content, member.mode)
                elif member.issym() and _stays(name, member.linkname):
                    links.append((name, member.linkname))
        for name, leads in links:
            _link(top, name, leads)
    finally:
        os.close(top)


def _stays(name: PurePosixPath, leads: str) -> bool:
    """Whether a link cannot lead out: steps up come first, and are fewer than the folders it lies in.

    A step up after another could follow a second link to a place that lies less deep.
    """
    parts = PurePosixPath(leads).parts
    up = sum(1 for part in parts if part == "..")
    return not leads.startswith("/") and parts[:up] == ("..",) * up and up < len(name.parts)


def _folder(top: int, name: PurePosixPath) -> int:
    """The folder of that name below `top`, made as far as it is missing; what is no folder makes way."""
    here = os.dup(top)
    for part in name.parts:
        with suppress(FileExistsError):
            os.mkdir(part, dir_fd=here)
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        except NotADirectoryError:  # a link is none, either
            os.unlink(part, dir_fd=here)
            os.mkdir(part, dir_fd=here)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


def _write(top: int, name: PurePosixPath, content: IO[bytes], mode: int) -> None:
    folder = _folder(top, name.parent)
    try:
        with suppress(FileNotFoundError):
            os.unlink(name.name, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(name.name, flags, 0o600, dir_fd=folder), "wb") as file:
            while chunk := content.read(_CHUNK_BYTES):
                file.write(chunk)
            os.fchmod(file.fileno(), stat.S_IMODE(mode) & 0o777 | 0o600)
    finally:
        os.close(folder)


def _link(top: int, name: PurePosixPath, leads: str) -> None:
    folder = _folder(top, name.parent)
    try:
        with suppress(FileNotFoundError):
            os.unlink(name.name, dir_fd=folder)
        os.symlink(leads, name.name, dir_fd=folder)
    except (IsADirectoryError, FileExistsError):
        pass  # a folder of that name is there already
    finally:
        os.close(folder)
