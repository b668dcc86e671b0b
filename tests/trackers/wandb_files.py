"""The files that Weights & Biases writes offline, read with its own records.

Its package has no reader in Python any more: the frames, which are those of LevelDB's log, are taken off here, and
what is in them is parsed by its own classes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32768
_FRAME_BYTES = 7
_HEADER_BYTES = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def payloads(path: Path) -> Iterator[bytes]:
    """The records of a file, which may be spread over several frames."""
    data, at, parts = path.read_bytes(), _HEADER_BYTES, b""
    assert data.startswith(b":W&B")
    while at < len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _FRAME_BYTES:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _FRAME_BYTES])
        part = data[at + _FRAME_BYTES : at + _FRAME_BYTES + length]
        at += _FRAME_BYTES + length
        parts = part if kind in (_FULL, _FIRST) else parts + part
        if kind in (_FULL, _LAST):
            yield parts


@dataclass
class Recorded:
    """What an offline run holds."""

    id: str = ""
    name: str = ""
    project: str = ""
    entity: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None


def read(folder: Path) -> Recorded:
    """The run in a folder `offline-run-…`."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = Recorded()
    (path,) = folder.glob("*.wandb")
    for payload in payloads(path):
        record = Record.FromString(payload)
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
                found.id, found.name, found.project, found.entity = (
                    run.run_id,
                    run.display_name,
                    run.project,
                    run.entity,
                )
                found.tags = list(run.tags)
                found.config = {item.key: json.loads(item.value_json) for item in run.config.update}
            case "history":
                found.steps.append(
                    {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
                )
            case "exit":
                found.exit_code = record.exit.exit_code
            case _:
                pass
    return found
