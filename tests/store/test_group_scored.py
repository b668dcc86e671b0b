"""The field of an episode that was `group_scored`, in new records and in those of earlier releases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlkit.store import codec, table
from rlkit.store.table import RecordedGroup
from rlkit.types import Episode, Group
from tests.builders import episode

OLD = {"correct": 1.0, "group_scored": 1.0}
"""Metrics of an episode that an earlier release marked as compared."""


def through_the_journal(recorded: Episode, *, field: bool) -> Episode:
    """Encode and decode an episode; without the field, as an earlier release wrote it."""
    data = codec.encode(recorded)
    end = 4 + int.from_bytes(data[:4], "little")
    header = json.loads(data[4:end])
    if not field:
        del header["group_scored"]
    text = json.dumps(header).encode()
    return codec.decode(len(text).to_bytes(4, "little") + text + data[end:])


def through_a_table(path: Path, recorded: Episode, *, field: bool) -> Episode:
    """Write and read an episode; without the column, as an earlier release wrote it."""
    table.write(path, [RecordedGroup(Group("env", "task", 0, (recorded,)), True, [recorded])], decode=lambda tokens: "")
    if not field:
        pq.write_table(pq.read_table(path).drop_columns("group_scored"), path)
        path.write_bytes(table._add_checksum(path.read_bytes()))  # pyright: ignore[reportPrivateUsage]
    (group,) = table.read_table(path)
    return group.group.episodes[0]


@pytest.mark.parametrize("where", ["journal", "table"])
@pytest.mark.parametrize(
    ("field", "written", "read"),
    [
        (True, (OLD, False), (OLD, False)),
        (True, ({"group_scored": 0.5}, True), ({"group_scored": 0.5}, True)),
        (False, (OLD, False), ({"correct": 1.0}, True)),
        (False, ({"correct": 1.0}, False), ({"correct": 1.0}, False)),
        (False, ({"group_scored": 0.5}, False), ({"group_scored": 0.5}, False)),
    ],
)
def test_the_field_is_read_as_it_was_written_and_from_the_marker_of_earlier_releases(
    where: str,
    field: bool,
    written: tuple[Mapping[str, float], bool],
    read: tuple[Mapping[str, float], bool],
    tmp_path: Path,
) -> None:
    recorded = replace(episode(1.0), metrics=written[0], group_scored=written[1])
    if where == "journal":
        back = through_the_journal(recorded, field=field)
    else:
        back = through_a_table(tmp_path / "episodes.parquet", recorded, field=field)
    assert (back.metrics, back.group_scored) == read
