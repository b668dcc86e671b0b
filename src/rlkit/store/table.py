# pyarrow has no types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownParameterType=false, reportMissingTypeStubs=false, reportAttributeAccessIssue=false
"""The episodes of a step as a Parquet file, one row an episode.

    pandas.read_parquet("RUN/episodes")
    duckdb.sql("select avg(reward) from 'RUN/episodes/*/*.parquet'")

Invariant: `read` gives back the episodes that `write` was given, exactly, or says that the file is damaged.

Between the data and the footer, where readers of Parquet do not look, stands the CRC-32 of all other bytes: the
checksums that Parquet has of its own leave out the footer.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlkit._util import files
from rlkit.store.codec import EPISODE_FIELDS, split_group_scored, to_json
from rlkit.types import IMAGE_TOKEN, Episode, Group, Image, Prompt, Tokens, Turn

_IMAGE = pa.struct(
    [("start", pa.int32()), ("length", pa.int32()), ("format", pa.string()), ("data", pa.large_binary())]
)
_TURN = pa.struct(
    [
        ("prompt", pa.list_(pa.int32())),
        ("completion", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("sampled", pa.list_(pa.bool_())),
        ("prompt_text", pa.large_string()),
        ("completion_text", pa.large_string()),
        ("images", pa.list_(_IMAGE)),
        ("stop", pa.string()),
        ("version", pa.int32()),
        ("parent", pa.int32()),
        ("reward", pa.float64()),
        ("seconds", pa.float64()),
        ("request_id", pa.string()),
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
        ("turns", pa.list_(_TURN)),
    ],
    metadata={"rlkit": "1"},
)
"""What a file holds; `step` is in the folder's name, as `step=000012`, and readers add it as a column.

`position` is the group's place in the step, `counts` whether it was one of the step's own or was replaced by another,
`final` whether this attempt is the one that its group holds; `metrics` and `info` are JSON.
"""

_COLUMNS = SCHEMA.names[:-1]
"""All columns but `turns`."""

_PLAIN_EPISODE = [name for name in EPISODE_FIELDS if name not in ("metrics", "info")]
_PLAIN_TURN = ("stop", "version", "parent", "reward", "seconds", "request_id")
"""Fields that stand in the table as they are."""

_DICTIONARIES = [
    f"turns.list.element.{name}"
    for name in ("prompt.list.element", "completion.list.element", "stop", "version", "parent")
]
_CRC_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """A group of a step: `attempts` are all that were played for it, those that failed and were played again too."""

    group: Group
    is_trained: bool
    attempts: Sequence[Episode]


def write(path: Path, groups: Sequence[StepGroup], *, decode: Callable[[Tokens], str]) -> None:
    """Write the groups of a step, in their order, in one operation; `decode` makes text for people who read it."""
    rows = [(position, step, episode) for position, step in enumerate(groups) for episode in step.attempts]
    final = {id(episode) for step in groups for episode in step.group.episodes}
    episodes = [episode for _, _, episode in rows]
    columns: dict[str, list[Any]] = {
        "position": [position for position, _, _ in rows],
        "counts": [step.is_trained for _, step, _ in rows],
        "draw": [step.group.draw for _, step, _ in rows],
        "env": [step.group.env for _, step, _ in rows],
        "task": [step.group.task for _, step, _ in rows],
        "final": [id(episode) in final for episode in episodes],
        "metrics": [to_json(episode.metrics) for episode in episodes],
        "info": [to_json(episode.info) for episode in episodes],
        **{name: [getattr(episode, name) for episode in episodes] for name in _PLAIN_EPISODE},
    }
    arrays = [pa.array(columns[name], SCHEMA.field(name).type) for name in _COLUMNS]
    turns = _turns([turn for episode in episodes for turn in episode.turns], decode)
    arrays.append(_nested(turns, [len(episode.turns) for episode in episodes]))
    written = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_arrays(arrays, schema=SCHEMA),
        written,
        compression="zstd",
        use_dictionary=[*_COLUMNS, *_DICTIONARIES],  # pyright: ignore[reportArgumentType]  it takes names of columns too
        # Of tokens and texts the least and the greatest say nothing to a reader who looks for rows.
        write_statistics=_COLUMNS,  # pyright: ignore[reportArgumentType]  it takes names of columns too
        column_encoding={"turns.list.element.logprobs.list.element": "BYTE_STREAM_SPLIT"},
    )
    files.write_bytes(path, _summed(written.getvalue().to_pybytes()))


def read(path: Path) -> list[StepGroup]:
    """Return the groups that `write` wrote.

    Raises:
        ValueError: the file is damaged.
    """
    found = pq.read_table(pa.BufferReader(_checked(path.read_bytes())), schema=SCHEMA)
    rows = cast("list[dict[str, Any]]", found.drop_columns("turns").to_pylist())
    turns = found.column("turns").combine_chunks()
    ends = np.cumsum(turns.value_lengths().to_numpy(zero_copy_only=False)) if len(rows) else []
    every = _read_turns(turns.flatten())
    starts = [0, *ends]
    groups: dict[int, list[tuple[dict[str, Any], Episode]]] = {}
    for index, row in enumerate(rows):
        own = tuple(every[int(starts[index]) : int(starts[index + 1])])
        row["metrics"], row["group_scored"] = split_group_scored(json.loads(row["metrics"]), row["group_scored"])
        row["info"] = json.loads(row["info"])
        episode = Episode(turns=own, **{name: row[name] for name in EPISODE_FIELDS})
        groups.setdefault(row["position"], []).append((row, episode))
    return [_group(groups[position]) for position in sorted(groups)]


def check(path: Path) -> None:
    """Check that a table is whole, without reading what it holds.

    Raises:
        ValueError: it is damaged.
    """
    _checked(path.read_bytes())


def _summed(data: bytes) -> bytes:
    at = _footer(data)
    return b"".join([data[:at], zlib.crc32(data).to_bytes(_CRC_BYTES, "little"), data[at:]])


def _checked(data: bytes) -> bytes:
    at = _footer(data)
    begin = max(at - _CRC_BYTES, 0)
    crc = zlib.crc32(memoryview(data)[max(at, 0) :], zlib.crc32(memoryview(data)[:begin]))
    if data[begin:at] != crc.to_bytes(_CRC_BYTES, "little"):
        raise ValueError("its checksum is not that of its content")
    return data


def _footer(data: bytes) -> int:
    """Return where the footer begins, by its length before the last four letters; negative in what is no table."""
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def _group(rows: Sequence[tuple[dict[str, Any], Episode]]) -> StepGroup:
    first = rows[0][0]
    final = sorted((episode for row, episode in rows if row["final"]), key=lambda episode: episode.member)
    group = Group(first["env"], first["task"], first["draw"], tuple(final))
    return StepGroup(group, first["counts"], [episode for _, episode in rows])


def _turns(turns: Sequence[Turn], decode: Callable[[Tokens], str]) -> pa.StructArray:
    prompts = [turn.prompt.tokens for turn in turns]
    completions = [turn.completion for turn in turns]
    images = [image for turn in turns for image in turn.prompt.images]
    fields: list[Any] = [
        _lists(prompts, pa.int32()),
        _lists(completions, pa.int32()),
        _lists([turn.logprobs for turn in turns], pa.float32()),
        _lists([turn.sampled for turn in turns], pa.bool_()),
        pa.array([decode(_without_images(turn.prompt)) for turn in turns], pa.large_string()),
        pa.array([decode(tokens) for tokens in completions], pa.large_string()),
        _nested(
            pa.array(
                [{"start": i.start, "length": i.length, "format": i.format, "data": i.data} for i in images], _IMAGE
            ),
            [len(turn.prompt.images) for turn in turns],
        ),
        *(pa.array([getattr(turn, name) for turn in turns], _TURN.field(name).type) for name in _PLAIN_TURN),
    ]
    return pa.StructArray.from_arrays(fields, fields=list(_TURN))


def _without_images(prompt: Prompt) -> Tokens:
    return prompt.tokens[prompt.tokens != IMAGE_TOKEN] if prompt.images else prompt.tokens


def _lists(arrays: Sequence[Any], kind: pa.DataType) -> pa.ListArray:
    values = np.concatenate(arrays) if arrays else np.empty(0)
    return _nested(pa.array(values, kind), [len(array) for array in arrays])


def _nested(values: pa.Array, lengths: Sequence[int]) -> pa.ListArray:
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values)


def _read_turns(turns: pa.StructArray) -> list[Turn]:
    fields = dict(zip(_TURN.names, turns.flatten(), strict=True))
    prompts, completions, logprobs, sampled = (
        _split(fields[name]) for name in ("prompt", "completion", "logprobs", "sampled")
    )
    images = cast("list[list[dict[str, Any]]]", fields["images"].to_pylist())
    plain = {name: fields[name].to_pylist() for name in _PLAIN_TURN}
    return [
        Turn(
            prompt=Prompt(
                prompts[i], tuple(Image(im["start"], im["length"], im["data"], im["format"]) for im in images[i])
            ),
            completion=completions[i],
            logprobs=logprobs[i],
            sampled=sampled[i],
            **{name: values[i] for name, values in plain.items()},
        )
        for i in range(len(prompts))
    ]


def _split(lists: pa.ListArray) -> list[Any]:
    values = lists.flatten().to_numpy(zero_copy_only=False)
    ends = np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False))
    return np.split(values, ends[:-1]) if len(lists) else []
