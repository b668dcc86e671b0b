"""The field `Episode.group_scored` beside a metric of the same name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlkit.store import codec, table
from rlkit.store.table import RecordedGroup
from rlkit.types import Group
from tests.builders import episode


@pytest.mark.parametrize("group_scored", [False, True])
def test_a_metric_named_group_scored_does_not_change_the_field(group_scored: bool, tmp_path: Path) -> None:
    recorded = replace(episode(1.0), metrics={"correct": 1.0, "group_scored": 1.0}, group_scored=group_scored)
    path = tmp_path / "episodes.parquet"
    group = RecordedGroup(Group("env", "task", 0, (recorded,)), True, [recorded])
    table.write(path, [group])
    for back in (codec.decode(codec.encode(recorded)), table.read_table(path)[0].group.episodes[0]):
        assert (back.metrics, back.group_scored) == (recorded.metrics, group_scored)
