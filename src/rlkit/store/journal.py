"""The journal of a run: a durable log of draws, episodes and steps in order.

Invariant: a record survives the process once `append` has returned. It survives a power cut once `sync` has returned,
`SYNC_WITHIN_S` have passed, or the journal was opened again. If the process dies while it writes a record, only that
record is dropped. A damaged record is reported, and later records are still read.

A journal is a folder of segments, `000001.log`, `000002.log`, …: segment n holds the records from the end of step n − 1
to the end of step n. A record is:

    length of the rest after the checksum (4 bytes, little-endian), CRC-32 of that rest (4 bytes, little-endian)
    mark (4 bytes, to find the next record after a damaged one), kind (1 byte), content

Nothing is compressed: a segment is soon deleted, and compressing an episode takes as long as encoding it.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from rlkit._util import files
from rlkit._util.threads import in_thread, start_task
from rlkit.errors import RunFailed

SYNC_WITHIN_S = 10.0  # delay after which records are synced automatically
_PREFIX_BYTES = 8
_MARK = b"\xb5rlk"


class RecordKind(IntEnum):
    """Kind of a record; it determines the content."""

    DRAW = 1  # a draw of a task: JSON
    EPISODE = 2  # an episode: the draw in eight bytes, and the encoded episode
    STEP = 3
    """The complete groups of a step: JSON. The last record of its segment."""


@dataclass(frozen=True, slots=True)
class Record:
    """Record in the segment of a step."""

    segment: int
    kind: RecordKind
    content: bytes


class Journal:
    """Writer of a run's journal; opening it syncs the records of earlier processes.

    Every method that writes raises `RunFailed` if it cannot.

    Args:
        segment: number of the segment to append to. Its complete records stay, and later segments are deleted.
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
                self._file = cleanup.enter_context(self._open_segment(segment))
                with ExitStack() as earlier:
                    _sync([earlier.enter_context(path.open("rb")) for _, path in list_segments(folder)], folder)
                cleanup.pop_all()
        except OSError as error:
            raise self._failure(error) from error
        self._has_new_segment = False
        self._full: list[BinaryIO] = []
        self._written = self._synced = 0  # records
        self._syncing: asyncio.Task[None] | None = None
        self._due: asyncio.TimerHandle | None = None
        self._late: asyncio.Task[None] | None = None
        self._broken: OSError | None = None

    def append(self, kind: RecordKind, content: bytes) -> None:
        """Write a record so that it survives the process; `sync` puts it on the disk."""
        if self._broken is not None:  # nothing can follow an incomplete record
            raise self._failure(self._broken)
        try:
            files.append(self._file, _frame(kind, content))
            self._written += 1
            if kind is RecordKind.STEP:
                self._full.append(self._file)
                self._segment += 1
                self._file = self._open_segment(self._segment)
        except OSError as error:
            raise self._failure(error) from error
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(SYNC_WITHIN_S, self._sync_late)

    async def sync(self) -> None:
        """Wait until every record so far is on the disk."""
        count = self._written
        while self._synced < count:
            if self._syncing is None:
                self._syncing = start_task(self._sync())
            await asyncio.shield(self._syncing)

    async def close(self) -> None:
        """Sync the records if possible, and close the files; a cancellation is raised after that."""
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
        """Delete the segments up to and including `segment`."""
        for number, path in list_segments(self._folder):
            if number <= segment and number != self._segment:
                path.unlink(missing_ok=True)

    async def _close(self) -> None:
        try:
            with suppress(RunFailed):  # callers that depend on a record have awaited `sync`
                await self.sync()
        finally:
            if self._due is not None:
                self._due.cancel()
            for file in [*self._full, self._file]:
                file.close()

    def _sync_late(self) -> None:
        self._due = None
        self._late = start_task(self.sync())

    async def _sync(self) -> None:
        written, full, file = self._written, self._full, self._file
        folder = self._folder if self._has_new_segment else None
        self._full, self._has_new_segment = [], False
        try:
            if self._broken is not None:  # the operating system does not retry a failed write
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
        return files.make_write_error(self._folder, error)

    def _open_segment(self, segment: int) -> BinaryIO:
        path = self._folder / f"{segment:06d}.log"
        if path.exists():
            os.truncate(path, sum(size for _, size in _read_frames(path)))
        file = path.open("ab", buffering=0)
        self._has_new_segment = True
        return file


def _sync(segments: Sequence[BinaryIO], folder: Path | None) -> None:
    for file in segments:
        os.fsync(file.fileno())
    if folder is not None:  # the folder has a new file
        files.sync_folder(folder)


def read_records(folder: Path, *, damaged: Callable[[Path], None] = lambda path: None) -> Iterator[Record]:
    """Yield every intact record in order; call `damaged` with the segment's path for each damaged record."""
    for number, path in list_segments(folder):
        for frame, _ in _read_frames(path):
            if frame is None:
                damaged(path)
            else:
                yield Record(number, RecordKind(frame[len(_MARK)]), frame[len(_MARK) + 1 :])


def list_segments(folder: Path) -> list[tuple[int, Path]]:
    """Return the numbers and paths of the segments in order."""
    return sorted((int(path.stem), path) for path in folder.glob("*.log") if path.stem.isdigit())


def _frame(kind: RecordKind, content: bytes) -> bytes:
    head = _MARK + bytes([kind])
    crc = zlib.crc32(content, zlib.crc32(head))
    return b"".join([(len(head) + len(content)).to_bytes(4, "little"), crc.to_bytes(4, "little"), head, content])


def _read_frames(path: Path) -> Iterator[tuple[bytes | None, int]]:
    """Yield mark, kind and content of each record of a segment, None if damaged, with the record's size in bytes.

    Damage without an intact record after it is ignored: the process or machine died while it wrote that record.
    """
    with path.open("rb") as file:
        offset, end = 0, os.fstat(file.fileno()).st_size
        while offset < end:
            frame = _read_frame(file, offset, end)
            next_offset = _find_frame(file, offset, end) if frame is None else offset + _PREFIX_BYTES + len(frame)
            if next_offset is None:
                return
            yield frame, next_offset - offset
            offset = next_offset


def _read_frame(file: BinaryIO, offset: int, end: int) -> bytes | None:
    """Return mark, kind and content of the record at an offset; None if it is damaged."""
    file.seek(offset)
    prefix = file.read(_PREFIX_BYTES)
    size, crc = (int.from_bytes(part, "little") for part in (prefix[:4], prefix[4:]))
    if not 0 < size <= end - offset - _PREFIX_BYTES:
        return None
    frame = file.read(size)
    return frame if frame.startswith(_MARK) and zlib.crc32(frame) == crc else None


def _find_frame(file: BinaryIO, offset: int, end: int) -> int | None:
    """Return the offset of the first intact record after a damaged one at `offset`."""
    with mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as data:
        mark = offset + _PREFIX_BYTES
        while (mark := data.find(_MARK, mark + 1)) >= 0:
            if _read_frame(file, mark - _PREFIX_BYTES, end) is not None:
                return mark - _PREFIX_BYTES
    return None
