"""Records of earlier releases, which lack the fields that were added since."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlkit.store import codec, table
from rlkit.store.table import RecordedGroup
from rlkit.types import Episode, Group, Prompt, Turn

TURN = Turn(
    prompt=Prompt(np.array([1, 2], np.int32)),
    completion=np.array([3, 4], np.int32),
    logprobs=np.array([-0.5, -0.25], np.float32),
    sampled_mask=np.ones(2, np.bool_),
    stop="stop",
    version=3,
    messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
    role="critic",
    frozen=True,
)
EPISODE = Episode(0, 0, (TURN,), "completed", 1.0, {}, {}, 0.0, rewards={"critic": 1.0})


def test_a_table_without_roles_is_read_with_the_policys_own(tmp_path: Path) -> None:
    path = tmp_path / "episodes.parquet"
    group = RecordedGroup(Group("env", "task", 0, (EPISODE,)), is_trained=True, attempts=[EPISODE])
    table.write(path, [group])
    columns = pq.read_table(path).drop_columns("rewards")
    lists = columns.column("turns").combine_chunks()
    turns = lists.flatten()
    kept = [field for field in turns.type if field.name not in ("role", "frozen")]
    old_turns = pa.StructArray.from_arrays([turns.field(field.name) for field in kept], fields=kept)
    old_lists = pa.ListArray.from_arrays(lists.offsets, old_turns)
    place = columns.schema.get_field_index("turns")
    buffer = pa.BufferOutputStream()
    pq.write_table(columns.set_column(place, "turns", old_lists), buffer)
    path.write_bytes(table._add_checksum(memoryview(buffer.getvalue())))  # pyright: ignore[reportPrivateUsage]
    (read,) = table.read_table(path)
    (episode,) = read.group.episodes
    assert episode.rewards == {}
    assert [(turn.role, turn.frozen) for turn in episode.turns] == [(None, False)]
    assert episode.turns[0].completion.tolist() == [3, 4]
    assert episode.turns[0].messages == TURN.messages


def test_a_journal_without_roles_is_read_with_the_policys_own() -> None:
    encoded = codec.encode(EPISODE)
    size = int.from_bytes(encoded[:4], "little")
    header = json.loads(encoded[4 : 4 + size])
    assert header.pop("rewards") == {"critic": 1.0}
    header["turns"] = [turn[: -len(codec.LATER_TURN_FIELDS)] for turn in header["turns"]]
    text = json.dumps(header).encode()
    episode = codec.decode(len(text).to_bytes(4, "little") + text + encoded[4 + size :])
    assert episode.rewards == {}
    assert [(turn.role, turn.frozen) for turn in episode.turns] == [(None, False)]
    assert episode.turns[0].logprobs.tolist() == [-0.5, -0.25]
    assert codec.decode(encoded).turns[0].role == "critic"
