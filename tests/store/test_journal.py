"""The journal and the tables: exact, durable, and whole up to a torn end."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import random
import struct
import threading
import zlib
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit._util import files
from rlkit.errors import RunFailed, UsageError
from rlkit.store import codec, table
from rlkit.store.history import read_groups
from rlkit.store.journal import SYNC_WITHIN_S, Journal, RecordKind, list_segments, read_records
from rlkit.testing import run_virtual
from rlkit.types import Episode, Group, Image, Prompt, Turn
from tests.limits import HANG_S, wait_until

floats32 = st.floats(width=32, allow_nan=False)
texts = st.text(max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    count = draw(st.integers(0, 5))
    prompt = draw(st.lists(st.integers(-1, 2**31 - 1), max_size=5))
    images = (Image(0, 1, draw(st.binary(max_size=4)), "png"),) if prompt and draw(st.booleans()) else ()
    return Turn(
        prompt=Prompt(np.array(prompt, np.int32), images),
        completion=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count)), np.int32),
        logprobs=np.array(draw(st.lists(floats32, min_size=count, max_size=count)), np.float32),
        sampled_mask=np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_),
        stop=draw(st.sampled_from(["stop", "length"])),
        version=draw(st.integers(0, 2**31 - 1)),
        parent=draw(st.none() | st.integers(0, 3)),
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        seconds=draw(st.floats(0, 1e6)),
        request_id=draw(st.none() | texts),
    )


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    failed = draw(st.booleans())
    return Episode(
        member=draw(st.integers(0, 100)),
        attempt=draw(st.integers(0, 5)),
        turns=tuple(draw(st.lists(turns(), max_size=3))),
        status="failed" if failed else "completed",
        reward=None if failed else draw(st.floats(allow_nan=False, allow_infinity=False)),
        metrics=draw(st.dictionaries(texts, st.floats(allow_nan=False, allow_infinity=False), max_size=3)),
        info=draw(st.dictionaries(texts, json_values, max_size=3)),
        seconds=draw(st.floats(0, 1e6)),
        error=draw(st.none() | texts),
        masked=draw(st.booleans()),
    )


@given(episodes())
def test_decoded_episode_equals_the_original(episode: Episode) -> None:
    data = codec.encode(episode)
    decoded = codec.decode(data)
    assert codec.encode(decoded) == data
    assert (decoded.reward, decoded.metrics, decoded.info, decoded.error, decoded.masked) == (
        episode.reward,
        episode.metrics,
        episode.info,
        episode.error,
        episode.masked,
    )
    for decoded_turn, turn in zip(decoded.turns, episode.turns, strict=True):
        np.testing.assert_array_equal(decoded_turn.logprobs, turn.logprobs)
        np.testing.assert_array_equal(decoded_turn.sampled_mask, turn.sampled_mask)
        assert decoded_turn.prompt.images == turn.prompt.images


@given(st.lists(st.lists(episodes(), min_size=1, max_size=3), max_size=3))
def test_table_returns_its_episodes(tmp_path_factory: pytest.TempPathFactory, groups: list[list[Episode]]) -> None:
    path = tmp_path_factory.mktemp("table") / "step=000001" / "episodes.parquet"
    written = [
        table.RecordedGroup(
            Group("env", f"task {draw}", draw, tuple(members)), is_trained=draw % 2 == 0, attempts=members
        )
        for draw, members in enumerate(groups)
    ]
    table.write(path, written)
    records = table.read_table(path)
    for record, expected in zip(records, written, strict=True):
        assert [codec.encode(episode) for episode in record.attempts] == [codec.encode(e) for e in expected.attempts]
        assert (record.group.env, record.group.task, record.group.draw, record.is_trained) == (
            expected.group.env,
            expected.group.task,
            expected.group.draw,
            expected.is_trained,
        )
    assert len(pd.read_parquet(path.parent.parent)) == sum(map(len, groups))


def some_groups() -> list[table.RecordedGroup]:
    def turn(count: int) -> Turn:
        tokens = np.arange(count, dtype=np.int32)
        return Turn(Prompt(tokens[:2]), tokens, -tokens / np.float32(8), tokens > 1, "stop", 1, seconds=1.0)

    episodes = [Episode(i, 0, (turn(4 + i), turn(3)), "completed", float(i), {"right": 1.0}, {}, 1.0) for i in range(4)]
    return [table.RecordedGroup(Group("env", "task", 7, tuple(episodes)), is_trained=True, attempts=episodes)]


def test_flipped_bit_in_a_table_is_detected(tmp_path: Path) -> None:
    path, rng = tmp_path / "episodes.parquet", random.Random(0)
    table.write(path, some_groups())
    original = path.read_bytes()
    footer = int.from_bytes(original[-8:-4], "little") + 8
    ends = [8 * byte + bit for byte in (*range(-16, 0), *range(-footer - 8, -footer)) for bit in range(8)]
    for place in [*ends, *(rng.randrange(8 * len(original)) for _ in range(600))]:
        data = bytearray(original)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(UsageError, match=r"episodes\.parquet is damaged"):
            read_groups(path)


@pytest.mark.parametrize("size", [0, 3, 11, 12, 100, -1])
def test_truncated_table_is_detected(size: int, tmp_path: Path) -> None:
    path = tmp_path / "episodes.parquet"
    table.write(path, some_groups())
    table.check_checksum(path.read_bytes())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UsageError, match=r"episodes\.parquet is damaged"):
        read_groups(path)
    with pytest.raises(ValueError, match="checksum"):
        table.check_checksum(path.read_bytes())


def test_table_stores_a_crc_of_all_other_bytes_before_its_footer(tmp_path: Path) -> None:
    path = tmp_path / "episodes.parquet"
    table.write(path, some_groups())
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    other_bytes = data[: footer - 4] + data[footer:]
    assert data[footer - 4 : footer] == zlib.crc32(other_bytes).to_bytes(4, "little")


def test_tables_have_statistics_of_numbers_but_not_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "episodes.parquet"
    table.write(path, some_groups())
    rows = pq.ParquetFile(path).metadata.row_group(0)
    columns = {rows.column(number).path_in_schema: rows.column(number) for number in range(rows.num_columns)}
    for name, column in columns.items():
        assert column.is_stats_set == ("." not in name), name
    assert (columns["reward"].statistics.min, columns["reward"].statistics.max) == (0.0, 3.0)
    for name in ("env", "task", "status"):  # texts that recur
        assert "RLE_DICTIONARY" in columns[name].encodings, name


def test_values_outside_json_are_decoded_as_text() -> None:
    episode = Episode(0, 0, (), "completed", 1.0, {}, {"path": PurePosixPath("x")}, 0.0)  # type: ignore[dict-item]  on purpose
    assert codec.decode(codec.encode(episode)).info == {"path": "PurePosixPath('x')"}


def write(folder: Path, contents: list[bytes], *, segment: int = 1) -> None:
    async def run() -> None:
        journal = Journal(folder, segment=segment)
        for content in contents:
            journal.append(RecordKind.EPISODE, content)
        await asyncio.gather(journal.sync(), journal.sync())
        await journal.close()

    asyncio.run(run())


def contents(folder: Path) -> list[bytes]:
    return [record.content for record in read_records(folder)]


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=6), st.data())
def test_torn_end_loses_only_the_last_record_and_can_be_appended_to(
    tmp_path_factory: pytest.TempPathFactory, written: list[bytes], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    write(folder, written[:-1])
    (path,) = [path for _, path in list_segments(folder)]
    size_before = path.stat().st_size
    write(folder, written[-1:])
    assert contents(folder) == written
    cut = data.draw(st.integers(size_before, path.stat().st_size - 1))
    os.truncate(path, cut)
    assert contents(folder) == written[:-1]
    write(folder, [b"more"])
    assert contents(folder) == [*written[:-1], b"more"]


def test_appending_removes_a_torn_end(tmp_path: Path) -> None:
    torn, intact = tmp_path / "torn", tmp_path / "whole"
    write(intact, [b"first", b"last"])
    write(torn, [b"first", b"torn"])
    os.truncate(torn / "000001.log", (torn / "000001.log").stat().st_size - 1)
    write(torn, [b"last"])
    damaged = list[Path]()
    assert [record.content for record in read_records(torn, damaged=damaged.append)] == [b"first", b"last"]
    assert damaged == []  # a torn end is no damage, and does not become any
    assert (torn / "000001.log").read_bytes() == (intact / "000001.log").read_bytes()


def test_segments_after_the_opened_one_are_deleted(tmp_path: Path) -> None:
    for segment in (1, 2, 3):
        write(tmp_path, [b"%d" % segment], segment=segment)
    write(tmp_path, [b"more"], segment=2)
    assert [(record.segment, record.content) for record in read_records(tmp_path)] == [
        (1, b"1"),
        (2, b"2"),
        (2, b"more"),
    ]
    assert [number for number, _ in list_segments(tmp_path)] == [1, 2]


def test_flipped_bit_loses_only_its_own_record(tmp_path: Path) -> None:
    written = [b"first", b"second" * 50, b"third", b"last"]
    ends = [0]
    for content in written:
        write(tmp_path, [content])
        ends.append((tmp_path / "000001.log").stat().st_size)
    path = tmp_path / "000001.log"
    original = path.read_bytes()
    for place in range(8 * len(original)):
        data = bytearray(original)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        damaged = list[Path]()
        records = [record.content for record in read_records(tmp_path, damaged=damaged.append)]
        damaged_number = next(number for number, end in enumerate(ends[1:]) if place // 8 < end)
        assert records == written[:damaged_number] + written[damaged_number + 1 :], place
        assert damaged == ([path] if damaged_number < len(written) - 1 else []), (
            place
        )  # the last one could be a torn end


def test_damaged_segment_can_be_appended_to(tmp_path: Path) -> None:
    write(tmp_path, [b"first", b"second", b"third"])
    path = tmp_path / "000001.log"
    data = bytearray(path.read_bytes())
    data[2] ^= 0x40  # in the first record's length
    path.write_bytes(data)
    write(tmp_path, [b"fourth"])
    assert contents(tmp_path) == [b"second", b"third", b"fourth"]


def test_damaged_record_does_not_lose_later_records(tmp_path: Path) -> None:
    write(tmp_path, [b"first", b"second", b"third"])
    (path,) = [path for _, path in list_segments(tmp_path)]
    data = bytearray(path.read_bytes())
    data[12] ^= 1  # in the first record's content
    path.write_bytes(data)
    write(tmp_path, [b"fourth"])
    damaged = list[Path]()
    assert [record.content for record in read_records(tmp_path, damaged=damaged.append)] == [
        b"second",
        b"third",
        b"fourth",
    ]
    assert damaged == [path]


def test_layout_of_a_segment_is_that_of_the_format(tmp_path: Path) -> None:
    """A run that an earlier rlkit wrote in the same format can be gone on with."""

    async def run() -> None:
        journal = Journal(tmp_path, segment=1)
        for kind in (RecordKind.DRAW, RecordKind.EPISODE, RecordKind.STEP):
            journal.append(kind, b"content of %d" % kind)
        await journal.close()

    def record(kind: int, content: bytes) -> bytes:
        framed = b"\xb5rlk" + bytes([kind]) + content
        return struct.pack("<II", len(framed), zlib.crc32(framed)) + framed

    asyncio.run(run())
    expected = [record(1, b"content of 1"), record(2, b"content of 2"), record(3, b"content of 3")]
    assert (tmp_path / "000001.log").read_bytes() == b"".join(expected)


def test_layout_of_an_episode_is_that_of_the_format() -> None:
    image = Image(1, 1, b"picture", "png")
    turns = [
        Turn(
            Prompt(np.array([5, -1], np.int32), (image,)),
            np.array([7, 8, 9], np.int32),
            np.array([-0.5, -1, 0], np.float32),
            np.array([True, False, True]),
            "stop",
            3,
            parent=None,
        ),
        Turn(
            Prompt(np.array([6], np.int32)),
            np.array([1], np.int32),
            np.array([-2], np.float32),
            np.array([True]),
            "length",
            4,
            parent=0,
        ),
    ]
    data = codec.encode(Episode(2, 1, tuple(turns), "completed", 0.5, {"right": 1.0}, {"a": [1]}, 2.0))
    size = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + size])
    assert (header["member"], header["attempt"], header["reward"], header["status"]) == (2, 1, 0.5, "completed")
    assert header["turns"][0][:5] == [2, 3, "stop", 3, None]
    assert header["turns"][0][-4:] == [[[1, 1, 7, "png"]], [], None, False]
    tokens = struct.pack("<2i1i", 5, -1, 6) + struct.pack("<3i1i", 7, 8, 9, 1)
    logprobs = struct.pack("<3f1f", -0.5, -1, 0, -2)
    assert data[4 + size :] == tokens + logprobs + bytes([0b10110000]) + b"picture"


def test_zeros_at_the_end_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, [b"one"])
    (path,) = [path for _, path in list_segments(tmp_path)]
    path.write_bytes(path.read_bytes() + bytes(4096))
    assert contents(tmp_path) == [b"one"]


def test_step_ends_its_segment_and_old_segments_can_be_deleted(tmp_path: Path) -> None:
    async def run() -> None:
        journal = Journal(tmp_path, segment=1)
        for step in (b"1", b"2", b"3"):
            journal.append(RecordKind.EPISODE, step)
            journal.append(RecordKind.STEP, step)
            await journal.sync()
        assert [record.segment for record in read_records(tmp_path)] == [1, 1, 2, 2, 3, 3]
        journal.drop_through(2)
        await journal.close()

    asyncio.run(run())
    assert [number for number, _ in list_segments(tmp_path)] == [3, 4]


def disk_full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_nothing_is_written_after_a_failed_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        journal = Journal(tmp_path, segment=1)
        journal.append(RecordKind.EPISODE, b"whole")
        with monkeypatch.context() as broken:
            broken.setattr("rlkit._util.files.append", disk_full)
            with pytest.raises(RunFailed, match="No space left on device; make room, then resume the run"):
                journal.append(RecordKind.EPISODE, b"lost")
        with pytest.raises(RunFailed, match="No space left"):
            journal.append(RecordKind.EPISODE, b"late")
        await journal.close()

    asyncio.run(run())
    assert contents(tmp_path) == [b"whole"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EDQUOT, "Disk quota exceeded; make room, then resume the run"),
        (errno.EIO, "Input/output error"),
        (errno.EROFS, "Read-only file system"),
    ],
)
def test_write_error_asks_for_room_only_if_it_would_help(number: int, message: str, tmp_path: Path) -> None:
    assert (
        str(files.make_write_error(tmp_path, OSError(number, os.strerror(number))))
        == f"cannot write to {tmp_path}: {message}"
    )


def test_failed_sync_is_raised_to_all_waiting_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[BaseException | None]:
        journal = Journal(tmp_path, segment=1)
        journal.append(RecordKind.EPISODE, b"whole")
        await journal.sync()
        journal.append(RecordKind.EPISODE, b"lost")
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", disk_full)
            failures = await asyncio.gather(journal.sync(), journal.sync(), return_exceptions=True)
        with pytest.raises(RunFailed, match="No space left"):  # though the disk has room again
            await journal.sync()
        await journal.close()
        return failures

    failures = asyncio.run(run())
    assert [type(failure) for failure in failures] == [RunFailed, RunFailed]
    assert "make room, then resume the run" in str(failures[0])


def test_record_is_synced_soon_without_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = list[float]()

    async def run() -> None:
        clock = asyncio.get_running_loop().time

        def flushed(_: object) -> None:
            times.append(clock())

        monkeypatch.setattr("rlkit.store.journal.os", SimpleNamespace(fsync=flushed, fstat=os.fstat))
        journal = Journal(tmp_path, segment=1)
        times.clear()
        journal.append(RecordKind.EPISODE, b"one")
        await asyncio.sleep(4)
        journal.append(RecordKind.EPISODE, b"two")  # goes with the first
        await asyncio.sleep(2 * SYNC_WITHIN_S)
        journal.append(RecordKind.EPISODE, b"three")
        await journal.sync()
        await asyncio.sleep(2 * SYNC_WITHIN_S)  # nothing is left to do
        journal.append(RecordKind.EPISODE, b"four")
        await journal.close()

    run_virtual(run())
    assert times == [SYNC_WITHIN_S, 4 + 2 * SYNC_WITHIN_S, 4 + 4 * SYNC_WITHIN_S]
    assert contents(tmp_path) == [b"one", b"two", b"three", b"four"]


def test_record_appended_during_a_sync_is_synced_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    async def run() -> None:
        free, is_syncing = threading.Event(), threading.Event()

        def slow(file: int) -> None:
            is_syncing.set()
            free.wait(HANG_S)
            sizes.append(os.fstat(file).st_size)

        monkeypatch.setattr("rlkit.store.journal.SYNC_WITHIN_S", 0.1)
        journal = Journal(tmp_path, segment=1)
        monkeypatch.setattr("rlkit.store.journal.os", SimpleNamespace(fsync=slow, fstat=os.fstat))
        journal.append(RecordKind.EPISODE, b"one")
        waiting = asyncio.create_task(journal.sync())
        await asyncio.to_thread(is_syncing.wait, HANG_S)
        journal.append(RecordKind.EPISODE, b"two")
        await asyncio.sleep(0.2)  # its time is over, and the disk is still busy with the first
        free.set()
        await waiting
        await asyncio.to_thread(wait_until, lambda: len(sizes) == 2)  # nobody asks for it
        await journal.close()

    asyncio.run(run())
    assert len(sizes) == 2


def test_failed_background_sync_is_raised_to_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        journal = Journal(tmp_path, segment=1)
        journal.append(RecordKind.EPISODE, b"one")
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", disk_full)
            await asyncio.sleep(2 * SYNC_WITHIN_S)
        with pytest.raises(RunFailed, match="No space left"):
            journal.append(RecordKind.EPISODE, b"two")
        await journal.close()

    run_virtual(run())


def test_cancelled_wait_does_not_cancel_other_waits(tmp_path: Path) -> None:
    async def run() -> None:
        journal = Journal(tmp_path, segment=1)
        journal.append(RecordKind.EPISODE, b"one")
        waiting = [asyncio.create_task(journal.sync()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await waiting[1]
        await journal.close()

    asyncio.run(run())
    assert contents(tmp_path) == [b"one"]


def test_closing_waits_for_writes_even_if_it_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, slow = os.fsync, threading.Event()

    def fsync(file: int) -> None:
        slow.wait(HANG_S)
        real(file)

    async def run() -> None:
        journal = Journal(tmp_path, segment=1)
        monkeypatch.setattr(os, "fsync", fsync)
        journal.append(RecordKind.STEP, b"slow")  # it opens the next segment, too
        written = asyncio.create_task(journal.sync())
        await asyncio.sleep(0)
        closing = asyncio.create_task(journal.close())
        await asyncio.sleep(0.01)
        closing.cancel()
        await asyncio.sleep(0.01)
        assert not closing.done()
        slow.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert written.done()

    asyncio.run(run())  # a file that is left open would be a warning
    assert contents(tmp_path) == [b"slow"]


def test_token_takes_at_most_ten_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    count, length = 32, 500

    def turn() -> Turn:
        tokens = (rng.zipf(1.3, length) % 50_000).astype(np.int32)  # as unevenly spread as those of a text
        logprobs = -rng.exponential(0.5, length).astype(np.float32)
        return Turn(Prompt(tokens[:50]), tokens, logprobs, np.ones(length, np.bool_), "stop", 3, seconds=1.0)

    episodes = [Episode(i, 0, (turn(),), "completed", math.pi, {"right": 1.0}, {}, 1.0) for i in range(count)]
    path = tmp_path / "episodes.parquet"
    group = table.RecordedGroup(Group("env", "task", 0, tuple(episodes)), is_trained=True, attempts=episodes)
    table.write(path, [group])
    assert path.stat().st_size / (count * (length + 50)) <= 10
