"""Writers return once the content and the name of a file are on the disk."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from pathlib import Path

import pytest

from rlkit._util import files
from rlkit.errors import RunFailed
from rlkit.store.journal import Journal, RecordKind, list_segments
from tests._util.files.disk import Disk, files_of_at_most


def test_a_replaced_file_survives_a_power_cut(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folders" / "file"
    for data in (b"old", b"newer"):
        files.write_bytes(path, data)
        disk.assert_holds(path)
    assert path.read_bytes() == b"newer"


def test_a_file_system_without_folder_flushes_is_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = errno.EINVAL

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_text(tmp_path / "file", "text")
    number = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        files.write_text(tmp_path / "file", "text")


def test_a_failed_record_leaves_nothing_in_the_journal(tmp_path: Path) -> None:
    async def run() -> None:
        journal = Journal(tmp_path, segment=1)
        journal.append(RecordKind.EPISODE, b"whole")
        size = path.stat().st_size
        with files_of_at_most(size + 5), pytest.raises(RunFailed, match=os.strerror(errno.EFBIG)):
            journal.append(RecordKind.EPISODE, b"lost")
        assert path.stat().st_size == size
        await journal.close()

    path = tmp_path / "000001.log"
    asyncio.run(run())


def test_segments_of_a_killed_process_are_flushed_when_the_journal_opens(disk: Disk, tmp_path: Path) -> None:
    folder = tmp_path / "journal"

    async def killed() -> None:
        journal = Journal(folder, segment=1)
        for kind in (RecordKind.STEP, RecordKind.STEP, RecordKind.EPISODE):
            journal.append(kind, b"{}")
        for number, path in list_segments(folder):
            with pytest.raises(AssertionError):
                disk.assert_holds(path)
            copy = folder / f"{number + 10:06d}.log"
            copy.write_bytes(path.read_bytes()[: -1 if number == 3 else None])
        await journal.close()

    async def opened() -> None:
        journal = Journal(folder, segment=13)
        for number, path in list_segments(folder):
            disk.assert_holds(path)
            assert bool(path.stat().st_size) == (number != 13)
        await journal.close()

    asyncio.run(killed())
    asyncio.run(opened())


def test_complete_segments_are_flushed_with_the_current_one(disk: Disk, tmp_path: Path) -> None:
    folder = tmp_path / "journal"

    async def run() -> None:
        journal = Journal(folder, segment=1)
        for kind in (RecordKind.EPISODE, RecordKind.STEP, RecordKind.EPISODE, RecordKind.STEP, RecordKind.EPISODE):
            journal.append(kind, b"{}")
        await journal.sync()
        assert [number for number, _ in list_segments(folder)] == [1, 2, 3]
        for _, path in list_segments(folder):
            disk.assert_holds(path)
        await journal.close()

    asyncio.run(run())


def test_a_journal_that_cannot_be_flushed_does_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RunFailed, match=os.strerror(errno.EIO)):
        Journal(tmp_path, segment=1)  # a file that is left open would be a warning
