from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.trackers.from_config import load_service
from rlkit.trackers.sync import send
from rlkit.trackers.tensorboard import crc32c
from tests.trackers.folders import write_run


def test_checksum_is_that_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


@given(st.binary(max_size=64))
def test_checksum_is_that_of_the_google_library(data: bytes) -> None:
    google = pytest.importorskip("google_crc32c")
    assert crc32c(data) == google.value(data)


def read_records(path: Path) -> list[bytes]:
    """The records in a file of events, each with right checksums."""

    def mask_crc(data: bytes) -> int:
        crc = crc32c(data)
        return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF

    data, contents = path.read_bytes(), list[bytes]()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == mask_crc(data[:8])
        contents.append(data[12 : 12 + length])
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == mask_crc(contents[-1])
        data = data[16 + length :]
    return contents


def test_each_step_is_an_event_with_its_metrics(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    send(directory, load_service("tensorboard", {}))
    (file,) = (directory / "tensorboard").iterdir()
    first, start, *steps = read_records(file)
    assert first.endswith(b"brain.Event:2")
    assert start.endswith(b"\x3a\x02\x08\x01")  # session_log {status: START}
    assert len(steps) == 4
    assert all(b"env/sums/reward/mean" in step and b"optim/odd" not in step for step in steps)
    assert struct.pack("<f", 0.3) in steps[3]


def test_tensorboard_itself_reads_each_step_once(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    directory = write_run(tmp_path / "run")
    settings = {"directory": str(tmp_path / "events")}
    for _ in range(2):
        send(directory, load_service("tensorboard", settings), is_new_run=True)
    events = loader.EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(event.step, round(event.value, 6)) for event in events.Scalars("env/sums/reward/mean")] == [
        (0, 0.0),
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
    ]


def test_resumed_run_gets_its_own_event_file(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    for _ in range(2):
        send(directory, load_service("tensorboard", {}), is_new_run=True)
    assert len(list((directory / "tensorboard").iterdir())) == 2
