"""Writer of TensorBoard event files, without the packages of TensorBoard and TensorFlow.

    tensorboard --logdir RUN/tensorboard

Invariant: a reader sees only complete records, and existing files are never changed. The first step in a new file
replaces that step and later ones in older files.

An event is a protobuf message in a `TFRecord` frame: length (8 bytes), checksum of the length, record, checksum of the
record, all little-endian. A checksum is a CRC-32C, rotated by 15 bits, plus a constant.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from functools import cache
from typing import BinaryIO

from rlkit._util import files
from rlkit._util.paths import expand_user
from rlkit._util.sections import Section
from rlkit.trackers.recorded_run import RecordedRun, RecordedStep
from rlkit.trackers.service import ServiceTracker
from rlkit.types import Json

_CASTAGNOLI = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_UINT32 = 0xFFFFFFFF

# Fields of tensorflow.Event, SessionLog, Summary and Summary.Value.
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION_LOG = 1, 2, 3, 5, 7
_STATUS, _START = 1, 1
_VALUE = 1
_TAG, _SIMPLE_VALUE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class TensorboardSettings(Section):
    """TensorBoard: event files, which `tensorboard --logdir` shows."""

    directory: str | None = None
    """Folder of the event files; null for `tensorboard` in the run's folder."""


class TensorboardTracker(ServiceTracker[TensorboardSettings]):
    """Write a run's metrics as TensorBoard events."""

    name = "tensorboard"
    settings_type = TensorboardSettings
    _file: BinaryIO
    _has_session_start = False

    def open(self, run: RecordedRun, state: Mapping[str, Json]) -> Mapping[str, Json]:  # noqa: D102  inherited
        directory = self.settings.directory
        folder = run.directory / "tensorboard" if directory is None else expand_user(directory)
        files.make_folder(folder)
        now = time.time()
        # TensorBoard reads the files of a folder in the order of their names.
        self._file = (folder / f"events.out.tfevents.{now:.6f}.rlkit").open("xb", buffering=0)
        self._write(_field(_WALL_TIME, _FIXED64, struct.pack("<d", now)) + _text(_FILE_VERSION, b"brain.Event:2"))
        return {}

    def show(self, step: RecordedStep) -> None:  # noqa: D102  inherited
        at = _field(_WALL_TIME, _FIXED64, struct.pack("<d", time.time())) + _field(_STEP, _VARINT, _varint(step.number))
        if not self._has_session_start:  # makes readers drop this step and later ones of older files
            self._write(at + _text(_SESSION_LOG, _field(_STATUS, _VARINT, _varint(_START))))
            self._has_session_start = True
        self._write(at + _text(_SUMMARY, b"".join(_text(_VALUE, _value(*metric)) for metric in step.metrics.items())))

    def close(self, status: str) -> None:  # noqa: D102  inherited
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        files.append(self._file, length + _checksum(length) + event + _checksum(event))


def _value(tag: str, number: float) -> bytes:
    return _text(_TAG, tag.encode()) + _field(_SIMPLE_VALUE, _FIXED32, struct.pack("<f", number))


def _text(number: int, content: bytes) -> bytes:
    return _field(number, _BYTES, _varint(len(content)) + content)


def _field(number: int, kind: int, content: bytes) -> bytes:
    return _varint(number << 3 | kind) + content


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def _checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & _UINT32)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of `data`, such as 0xE3069283 for `b"123456789"`."""
    crc, table = _UINT32, _table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ _UINT32


@cache
def _table() -> tuple[int, ...]:
    rows = tuple(range(256))
    for _ in range(8):
        rows = tuple(row >> 1 ^ (_CASTAGNOLI if row & 1 else 0) for row in rows)
    return rows
