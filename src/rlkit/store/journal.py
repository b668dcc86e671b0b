"""The journal of a run: what happened, in order, durable before it counts.

Invariant: a record survives the process once `append` has returned, and a power cut once `sync` has, or `SYNC_WITHIN_S`
later, or once the journal was opened again. A record that was being written when the process died is recognised and
dropped, and nothing that stands before it is lost. One that is damaged is told, and nothing that stands behind it is
lost.

A journal is a folder of segments, `000001.log`, `000002.log`, …: segment n holds what happened from the end of the
batch of step n − 1 to the end of that of step n. A record is its length and its CRC-32, four bytes each and
little-endian, and then what they are of: four bytes by which a record is found behind a damaged one, one byte for its
kind, and its content. Nothing is compressed: a segment is deleted soon, and to compress an episode takes as long as to
encode it.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from rlkit._util import files
from rlkit._util.threads import in_thread
from rlkit.errors import RunFailed

SYNC_WITHIN_S = 10.0
"""How long a record waits to be put on the disk when nobody asks for it."""

_PREFIX_BYTES = 8
_MARK = b"\xb5rlk"


class RecordKind(IntEnum):
    """What a record is about."""

    DRAW = 1
    """A task was drawn: JSON."""
    EPISODE = 2
    """An episode ended: the draw, eight bytes, and the encoded episode."""
    STEP = 3
    """The groups of a step are complete: JSON. Always the last of its segment."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the step `segment`."""

    segment: int
    kind: RecordKind
    content: bytes


class Journal:
    """Writes the journal of a run.

    What an earlier process wrote and did not put on the disk is there once the journal is open.

    Args:
        folder: holds the segments.
        segment: the one to write to. Its whole records are kept, and later segments are deleted.

    Raises:
        RunFailed: it cannot be written.
    """

    def __init__(self, folder: Path, *, segment: int) -> None:
        self._folder = folder
        self._segment = segment
        try:
            files.make_folder(folder)
            for number, path in list_segments(folder):
                if number > segment:
                    path.unlink()
            with ExitStack() as cleanup:
                self._file = cleanup.enter_context(self._opened(segment))
                with ExitStack() as earlier:
                    _sync([earlier.enter_context(path.open("rb")) for _, path in list_segments(folder)], folder)
                cleanup.pop_all()
        except OSError as error:
            raise self._failure(error) from error
        self._begun = False
        self._full: list[BinaryIO] = []
        self._written = self._synced = 0
        self._syncing: asyncio.Task[None] | None = None
        self._due: asyncio.TimerHandle | None = None
        self._late: asyncio.Task[None] | None = None
        self._broken: OSError | None = None

    def append(self, kind: RecordKind, content: bytes) -> None:
        """Write a record, which outlives the process; `sync` puts it on the disk. Records keep their order.

        Raises:
            RunFailed: it cannot be written.
        """
        if self._broken is not None:  # after a torn record nothing can follow
            raise self._failure(self._broken)
        try:
            files.append(self._file, _framed(kind, content))
            self._written += 1
            if kind is RecordKind.STEP:
                self._full.append(self._file)
                self._segment += 1
                self._file = self._opened(self._segment)
        except OSError as error:
            raise self._failure(error) from error
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(SYNC_WITHIN_S, self._sync_what_waits)

    async def sync(self) -> None:
        """Return when all that was appended is on the disk; a RunFailed says why it cannot be."""
        wanted = self._written
        while self._synced < wanted:
            if self._syncing is None:
                self._syncing = asyncio.create_task(self._sync())
                self._syncing.add_done_callback(_leave_failure)
            await asyncio.shield(self._syncing)

    async def close(self) -> None:
        """Put what was appended on the disk, if it can be, and close the files; a cancellation waits for that."""
        closing, cancelled = asyncio.create_task(self._close()), None
        while not closing.done():
            try:
                await asyncio.wait([closing])
            except asyncio.CancelledError as error:
                cancelled = error
        closing.result()
        if cancelled is not None:
            raise cancelled

    def drop_through(self, segment: int) -> None:
        """Delete the segments up to and including this number."""
        for number, path in list_segments(self._folder):
            if number <= segment and number != self._segment:
                path.unlink(missing_ok=True)

    async def _close(self) -> None:
        try:
            with suppress(RunFailed):  # whoever needed it there has waited for it
                await self.sync()
        finally:
            if self._due is not None:
                self._due.cancel()
            for file in [*self._full, self._file]:
                file.close()

    def _sync_what_waits(self) -> None:
        self._due = None
        self._late = asyncio.create_task(self.sync())
        self._late.add_done_callback(_leave_failure)

    async def _sync(self) -> None:
        written, full, file = self._written, self._full, self._file
        folder = self._folder if self._begun else None
        self._full, self._begun = [], False
        try:
            if self._broken is not None:  # what the system failed to write it does not try to write again
                raise self._broken
            await in_thread(_sync, [*full, file], folder)
            self._synced = written
        except OSError as error:
            raise self._failure(error) from error
        finally:
            self._syncing = None
            for segment in full:
                segment.close()

    def _failure(self, error: OSError) -> RunFailed:
        self._broken = error
        return make_write_error(self._folder, error)

    def _opened(self, segment: int) -> BinaryIO:
        path = self._folder / f"{segment:06d}.log"
        whole = sum(size for _, size in _frames(path)) if path.exists() else 0
        with ExitStack() as cleanup:
            file = cleanup.enter_context(path.open("ab", buffering=0))
            file.truncate(whole)
            file.seek(whole)
            cleanup.pop_all()
        self._begun = True
        return file


def make_write_error(folder: Path, error: OSError) -> RunFailed:
    """Return the error of a run that cannot write to a folder."""
    remedy = "; make room, then resume the run" if error.errno in files.FULL else ""
    return RunFailed(f"cannot write to {folder}: {error.strerror or error}{remedy}")


@contextmanager
def report_write_errors(folder: Path) -> Generator[None]:
    """Raise an `OSError` inside as a `RunFailed` that names the folder."""
    try:
        yield
    except OSError as error:
        raise make_write_error(folder, error) from error


def _leave_failure(done: asyncio.Task[None]) -> None:
    """Leave an error to the next one who asks: the journal remembers it."""
    if not done.cancelled():
        done.exception()


def _sync(segments: Sequence[BinaryIO], folder: Path | None) -> None:
    for file in segments:
        os.fsync(file.fileno())
    if folder is not None:  # it holds a new file
        files.sync_folder(folder)


def read_records(folder: Path, *, damaged: Callable[[Path], None] = lambda path: None) -> Iterator[Record]:
    """Yield every whole record, in order; `damaged` receives a segment for each record in it that cannot be read."""
    for number, path in list_segments(folder):
        for framed, _ in _frames(path):
            if framed is None:
                damaged(path)
            else:
                yield Record(number, RecordKind(framed[len(_MARK)]), framed[len(_MARK) + 1 :])


def list_segments(folder: Path) -> list[tuple[int, Path]]:
    """Return the segments in order, with their numbers."""
    if not folder.is_dir():
        return []
    return sorted((int(path.stem), path) for path in folder.glob("*.log") if path.stem.isdigit())


def _framed(kind: RecordKind, content: bytes) -> bytes:
    head = _MARK + bytes([kind])
    crc = zlib.crc32(content, zlib.crc32(head))
    return b"".join([(len(head) + len(content)).to_bytes(4, "little"), crc.to_bytes(4, "little"), head, content])


def _frames(path: Path) -> Iterator[tuple[bytes | None, int]]:
    """Yield the records of a segment with their sizes in bytes; None for a damaged one.

    A torn end with nothing whole behind it was being written when the process or the machine died, and is no record.
    """
    with path.open("rb") as file:
        at, end = 0, os.fstat(file.fileno()).st_size
        while at < end:
            framed = _whole(file, at, end)
            following = _next_whole(file, at, end) if framed is None else at + _PREFIX_BYTES + len(framed)
            if following is None:
                return
            yield framed, following - at
            at = following


def _whole(file: BinaryIO, at: int, end: int) -> bytes | None:
    """Return mark, kind and content of the record that begins at a place; None if no whole one does."""
    file.seek(at)
    prefix = file.read(_PREFIX_BYTES)
    size, crc = (int.from_bytes(part, "little") for part in (prefix[:4], prefix[4:]))
    if not 0 < size <= end - at - _PREFIX_BYTES:
        return None
    framed = file.read(size)
    return framed if framed.startswith(_MARK) and zlib.crc32(framed) == crc else None


def _next_whole(file: BinaryIO, at: int, end: int) -> int | None:
    """Return where the first whole record begins behind the beginning of a damaged one."""
    with mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as data:
        mark = at + _PREFIX_BYTES
        while (mark := data.find(_MARK, mark + 1)) >= 0:
            if _whole(file, mark - _PREFIX_BYTES, end) is not None:
                return mark - _PREFIX_BYTES
    return None
