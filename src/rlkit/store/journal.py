"""The journal of a run: what happened, in order, durable before it counts.

Invariant: a record that `append` has returned for survives a power cut; a record that was being written when the
process died is recognised and dropped, and nothing that stands before it is lost.

A journal is a folder of segments, `000001.log`, `000002.log`, …: segment n holds what happened from the end of the
batch of step n − 1 to the end of that of step n. A record is its length and its CRC-32, four bytes each and
little-endian, and then its content, compressed with zstandard: one byte for its kind, and the rest.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

import zstandard

from rlkit.errors import RunFailed

_LEVEL = 3
_PREFIX_BYTES = 8


class Kind(IntEnum):
    """What a record is about."""

    DRAW = 1
    """A task was drawn: JSON."""
    EPISODE = 2
    """An episode ended: the draw, eight bytes, and the encoded episode."""
    STEP = 3
    """The groups of a step are complete: JSON. Always the last of its segment."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record; `segment` is the step that it belongs to."""

    segment: int
    kind: Kind
    content: bytes


class Journal:
    """Writes the journal of a run.

    Args:
        folder: of the segments.
        segment: to write to; what stands in it already is kept, but for a torn end.
    """

    def __init__(self, folder: Path, *, segment: int) -> None:
        self._folder = folder
        self._segment = segment
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._opened(segment)
        self._pending: list[tuple[bytes, Kind, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._broken: OSError | None = None

    def append(self, kind: Kind, content: bytes) -> asyncio.Future[None]:
        """Write a record; await what comes back to know that it is on the disk. Records keep their order.

        Raises:
            RunFailed: when awaited: it cannot be written.
        """
        durable = asyncio.get_running_loop().create_future()
        durable.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._pending.append((content, kind, durable))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return durable

    async def close(self) -> None:
        """Write what is waiting, and let go of the file; a cancellation must wait for that."""
        cancelled: asyncio.CancelledError | None = None
        while self._writing is not None and not self._writing.done():
            try:
                await asyncio.wait([self._writing])
            except asyncio.CancelledError as error:
                cancelled = error
        self._file.close()
        if cancelled is not None:
            raise cancelled

    def drop_through(self, segment: int) -> None:
        """Delete the segments up to and including this one."""
        for number, path in segments(self._folder):
            if number <= segment and number != self._segment:
                path.unlink(missing_ok=True)

    async def _write(self) -> None:
        """Everything that waits goes to the disk together, as often as needed."""
        loop = asyncio.get_running_loop()
        try:
            while self._pending:
                batch, self._pending = self._pending, []
                try:
                    await loop.run_in_executor(None, self._commit, [(kind, content) for content, kind, _ in batch])
                    failure = None
                except OSError as error:
                    self._broken = error
                    failure = RunFailed(
                        f"cannot write to {self._folder}: {error.strerror or error}; make room, then resume the run"
                    )
                for _, _, durable in batch:
                    if durable.done():
                        continue
                    if failure is None:
                        durable.set_result(None)
                    else:
                        durable.set_exception(failure)
        finally:
            self._writing = None

    def _commit(self, batch: list[tuple[Kind, bytes]]) -> None:
        if self._broken is not None:  # after a torn record nothing can follow
            raise self._broken
        for kind, content in batch:
            self._file.write(_framed(bytes([kind]) + content))
            if kind is Kind.STEP:
                self._sync()
                self._file.close()
                self._segment += 1
                self._file = self._opened(self._segment)
        self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _opened(self, segment: int) -> BinaryIO:
        path = self._folder / f"{segment:06d}.log"
        whole = sum(size for _, size in _frames(path)) if path.exists() else 0
        with ExitStack() as cleanup:
            file = cleanup.enter_context(path.open("ab"))
            file.truncate(whole)
            _sync_folder(self._folder)  # or the new file's name could be lost with the power
            cleanup.pop_all()
        return file


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def records(folder: Path) -> Iterator[Record]:
    """Every whole record, in order."""
    for number, path in segments(folder):
        for content, _ in _frames(path):
            yield Record(number, Kind(content[0]), content[1:])


def segments(folder: Path) -> list[tuple[int, Path]]:
    """The segments that there are, by number."""
    if not folder.is_dir():
        return []
    return sorted((int(path.stem), path) for path in folder.glob("*.log") if path.stem.isdigit())


def _framed(content: bytes) -> bytes:
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(content)
    return len(packed).to_bytes(4, "little") + zlib.crc32(packed).to_bytes(4, "little") + packed


def _frames(path: Path) -> Iterator[tuple[bytes, int]]:
    """The whole records of a segment, each with the bytes that it takes up."""
    decompressor = zstandard.ZstdDecompressor()
    with path.open("rb") as file:
        while len(prefix := file.read(_PREFIX_BYTES)) == _PREFIX_BYTES:
            size, crc = (int.from_bytes(part, "little") for part in (prefix[:4], prefix[4:]))
            packed = file.read(size)
            if not size or len(packed) < size or zlib.crc32(packed) != crc:
                return
            yield decompressor.decompress(packed), _PREFIX_BYTES + size
