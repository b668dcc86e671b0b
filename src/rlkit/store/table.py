# pyarrow has no types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownParameterType=false, reportMissingTypeStubs=false, reportAttributeAccessIssue=false
"""The episodes of a step as a Parquet file, one row per episode.

    pandas.read_parquet("RUN/episodes")
    duckdb.sql("select avg(reward) from 'RUN/episodes/*/*.parquet'")

Invariant: `read_table` returns exactly the episodes that `write` wrote, or reports that the file is damaged.

A CRC-32 of the file is between the data and the footer, where readers of Parquet ignore it. Parquet's own checksums
exclude the footer.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from rlkit._util import files
from rlkit.store.codec import EPISODE_FIELDS, LATER_TURN_FIELDS, TURN_FIELDS, to_json
from rlkit.token_records.list_columns import join_arrays, make_lists, row_ends, split_lists
from rlkit.types import Episode, Group, Image, Prompt, Turn

_IMAGE = pa.struct(
    [("start", pa.int32()), ("length", pa.int32()), ("format", pa.string()), ("data", pa.large_binary())]
)
_TURN = pa.struct(
    [
        ("prompt", pa.list_(pa.int32())),
        ("completion", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("sampled", pa.list_(pa.bool_())),
        ("messages", pa.large_string()),
        ("images", pa.list_(_IMAGE)),
        ("stop", pa.string()),
        ("version", pa.int32()),
        ("parent", pa.int32()),
        ("reward", pa.float64()),
        ("seconds", pa.float64()),
        ("request_id", pa.string()),
        ("role", pa.string()),
        ("frozen", pa.bool_()),
    ]
)
SCHEMA = pa.schema(
    [
        ("position", pa.int32()),
        ("counts", pa.bool_()),
        ("draw", pa.int64()),
        ("env", pa.string()),
        ("task", pa.string()),
        ("member", pa.int32()),
        ("attempt", pa.int32()),
        ("final", pa.bool_()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("error", pa.string()),
        ("masked", pa.bool_()),
        ("group_scored", pa.bool_()),
        ("seconds", pa.float64()),
        ("metrics", pa.string()),
        ("info", pa.string()),
        ("rewards", pa.string()),
        ("turns", pa.list_(_TURN)),
    ],
    metadata={"rlkit": "1"},
)
"""Columns of a file; readers add the column `step` from the folder's name, such as `step=000012`.

- `position`: index of the group in the step.
- `counts`: false if another group replaced this group.
- `final`: true for the last attempt of each member.
- `metrics`, `info`, `rewards`, `messages`: JSON.
"""

_COLUMNS = SCHEMA.names[:-1]  # all columns except `turns`
_JSON_FIELDS = ("metrics", "info", "rewards")
_COPIED_FIELDS = [name for name in EPISODE_FIELDS if name not in _JSON_FIELDS]
"""Fields of an episode that are columns without conversion."""

_DICTIONARIES = [f"turns.list.element.{name}" for name in ("stop", "version", "parent")]
_CRC_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class RecordedGroup:
    """A group of a step with all its attempts; `is_trained` is False if another group replaced it."""

    group: Group
    is_trained: bool
    attempts: Sequence[Episode]


def write(path: Path, groups: Sequence[RecordedGroup]) -> None:
    """Write the groups of a step atomically."""
    rows = [(position, group, episode) for position, group in enumerate(groups) for episode in group.attempts]
    final = {id(episode) for group in groups for episode in group.group.episodes}
    episodes = [episode for _, _, episode in rows]
    columns: dict[str, list[Any]] = {
        "position": [position for position, _, _ in rows],
        "counts": [group.is_trained for _, group, _ in rows],
        **{name: [getattr(group.group, name) for _, group, _ in rows] for name in ("draw", "env", "task")},
        "final": [id(episode) in final for episode in episodes],
        **{name: [to_json(getattr(episode, name)) for episode in episodes] for name in _JSON_FIELDS},
        **{name: [getattr(episode, name) for episode in episodes] for name in _COPIED_FIELDS},
    }
    arrays = [pa.array(columns[name], SCHEMA.field(name).type) for name in _COLUMNS]
    turns = _encode_turns([turn for episode in episodes for turn in episode.turns])
    arrays.append(make_lists(turns, [len(episode.turns) for episode in episodes]))
    buffer = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_arrays(arrays, schema=SCHEMA),
        buffer,
        compression="zstd",
        # Dictionaries of tokens take longer, and zstd finds their repetitions as well.
        use_dictionary=[*_COLUMNS, *_DICTIONARIES],  # pyright: ignore[reportArgumentType]  accepts column names, too
        # Readers do not select rows by minima and maxima of tokens and texts.
        write_statistics=_COLUMNS,  # pyright: ignore[reportArgumentType]  accepts column names, too
        column_encoding={"turns.list.element.logprobs.list.element": "BYTE_STREAM_SPLIT"},
        write_batch_size=2**16,  # values; the default of 1,024 makes a hundred calls for a column of tokens
    )
    files.write_bytes(path, _add_checksum(memoryview(buffer.getvalue())))


def read_table(path: Path) -> list[RecordedGroup]:
    """Return the groups that `write` wrote; raise `ValueError` if the file is damaged."""
    data = path.read_bytes()
    check_checksum(data)
    # Threads of Arrow can abort a process that ends soon after.
    columns = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    rows = cast("list[dict[str, Any]]", columns.drop_columns("turns").to_pylist())
    turns = columns.column("turns").combine_chunks()
    all_turns = _decode_turns(turns.flatten())
    groups: dict[int, list[tuple[dict[str, Any], Episode]]] = {}
    for row, (start, end) in zip(rows, pairwise(row_ends(turns)), strict=True):
        row |= {name: json.loads(row[name]) for name in _JSON_FIELDS if name in row}
        fields = {name: row[name] for name in EPISODE_FIELDS if name in row}
        episode = Episode(turns=tuple(all_turns[start:end]), **fields)
        groups.setdefault(row["position"], []).append((row, episode))
    return [_make_group(groups[position]) for position in sorted(groups)]


def _add_checksum(data: memoryview) -> bytes:
    footer = _find_footer(data)
    return b"".join([data[:footer], zlib.crc32(data).to_bytes(_CRC_BYTES, "little"), data[footer:]])


def check_checksum(data: bytes) -> None:
    """Raise `ValueError` if the contents of a table do not match its checksum."""
    footer = _find_footer(data)
    end = max(footer - _CRC_BYTES, 0)
    crc = zlib.crc32(memoryview(data)[max(footer, 0) :], zlib.crc32(memoryview(data)[:end]))
    if data[end:footer] != crc.to_bytes(_CRC_BYTES, "little"):
        raise ValueError("the checksum does not match the content")


def _find_footer(data: bytes | memoryview) -> int:
    """Return the offset of the footer, computed from its length in bytes −8 to −4; negative if this is no table."""
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def _make_group(rows: Sequence[tuple[dict[str, Any], Episode]]) -> RecordedGroup:
    first = rows[0][0]
    final = sorted((episode for row, episode in rows if row["final"]), key=lambda episode: episode.member)
    group = Group(first["env"], first["task"], first["draw"], tuple(final))
    return RecordedGroup(group, first["counts"], [episode for _, episode in rows])


def _encode_turns(turns: Sequence[Turn]) -> pa.StructArray:
    images = [asdict(image) for turn in turns for image in turn.prompt.images]
    fields: list[Any] = [
        join_arrays([turn.prompt.tokens for turn in turns], pa.int32()),
        join_arrays([turn.completion for turn in turns], pa.int32()),
        join_arrays([turn.logprobs for turn in turns], pa.float32()),
        join_arrays([turn.sampled_mask for turn in turns], pa.bool_()),
        pa.array([to_json(turn.messages) if turn.messages else None for turn in turns], pa.large_string()),
        make_lists(pa.array(images, _IMAGE), [len(turn.prompt.images) for turn in turns]),
        *(
            pa.array([getattr(turn, name) for turn in turns], _TURN.field(name).type)
            for name in (*TURN_FIELDS, *LATER_TURN_FIELDS)
        ),
    ]
    return pa.StructArray.from_arrays(fields, fields=list(_TURN))


def _decode_turns(turns: pa.StructArray) -> list[Turn]:
    fields = dict(zip((field.name for field in turns.type), turns.flatten(), strict=True))
    prompts, completions, logprobs, sampled = (
        split_lists(fields[name]) for name in ("prompt", "completion", "logprobs", "sampled")
    )
    images = cast("list[list[dict[str, Any]]]", fields["images"].to_pylist())
    copied = {name: fields[name].to_pylist() for name in (*TURN_FIELDS, *LATER_TURN_FIELDS) if name in fields}
    # Tables of earlier releases have no messages.
    texts = fields["messages"].to_pylist() if "messages" in fields else [None] * len(prompts)
    messages = [() if text is None else tuple(json.loads(text)) for text in cast("list[str | None]", texts)]
    return [
        Turn(
            prompt=Prompt(prompts[i], tuple(Image(**image) for image in images[i])),
            completion=completions[i],
            logprobs=logprobs[i],
            sampled_mask=sampled[i],
            **{name: values[i] for name, values in copied.items()},
            messages=messages[i],
        )
        for i in range(len(prompts))
    ]
