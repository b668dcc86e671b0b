# pyarrow has no types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownParameterType=false, reportMissingTypeStubs=false, reportUnknownLambdaType=false
"""Rows of a run's tables of episodes, without what a page does not show.

Invariant: reading is enough to read; no file of a run is opened for writing or locked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from rlkit.token_records.list_columns import as_numpy, read_columns, row_ends
from rlkit.token_records.pieces import read_pieces
from rlkit.token_records.updates import read_update
from rlkit.view.records.reader import Place, Row

_SCORE = ["final", "env", "task", "status", "position", "member", "attempt", "reward"]
_MEMBER = [*_SCORE, "counts", "draw", "error", "masked", "seconds", "metrics"]
_TURN = ["stop", "version", "sampled.list.element"]
_REPLY = ["completion", "completion_text"]  # earlier releases have texts
_BATCH_ROWS = 16  # as Python objects, tokens need ten times the memory


def cache_file[T](read: Callable[[Path], T], *, files: int = 2) -> Callable[[Path], T]:
    """Return a function that keeps what `read` returned of some files, which nobody may change, until one changes."""
    read_version = lru_cache(files)(lambda path, *_: read(path))
    return lambda path: read_version(path, *((path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else ()))


def read_scores(path: Path) -> list[Sequence[Any]]:
    """Return environment, task, status, position, member, attempt and reward of each episode, last attempts only."""
    table = read_columns(path, _SCORE)
    return [row for is_final, *row in zip(*(table[name].to_pylist() for name in _SCORE), strict=True) if is_final]


@cache_file
def read_members(path: Path) -> list[Row]:
    """Return each attempt of a table, with counts of its turns and sampled tokens; see `_count_turns`."""
    table = read_columns(path, [*_MEMBER, *(f"turns.list.element.{name}" for name in _TURN)])
    rows = cast("list[Row]", table.drop_columns("turns").to_pylist())
    for row, counts in zip(rows, _count_turns(table.column("turns").combine_chunks()), strict=True):
        row |= {"metrics": json.loads(row["metrics"]), **counts}
    return rows


def read_attempts(path: Path, position: int) -> dict[Place, Row]:
    """Return the attempts of a group with all that is recorded."""
    table = _read_table(path)
    positions = table.column("position").to_pylist()  # in order
    rows = cast("list[Row]", table.slice(positions.index(position), positions.count(position)).to_pylist())
    return {(position, row["member"], row["attempt"]): row for row in rows}


def read_attempt(path: Path, place: Place) -> Row:
    """Return an attempt of a table with all that is recorded."""
    table = _read_table(path)
    places = list(zip(*(table[name].to_pylist() for name in ("position", "member", "attempt")), strict=True))
    return cast("Row", table.slice(places.index(place), 1).to_pylist()[0])


read_texts, read_updates = cache_file(read_pieces), cache_file(read_update)
_read_table = cache_file(read_columns, files=1)  # for the next episode of the step


def read_completions(path: Path) -> Iterator[Row]:
    """Yield position, member, attempt and turns of each episode, turns with their completion only."""
    table = read_columns(path, ["position", "member", "attempt", *(f"turns.list.element.{name}" for name in _REPLY)])
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        yield from cast("list[Row]", batch.to_pylist())


def _count_turns(turns: pa.ListArray) -> list[Row]:
    """Return `turns`, `tokens` (sampled), `cut` (a turn ended at its limit) and `versions` of each episode."""
    fields = dict(zip((field.name for field in turns.flatten().type), turns.flatten().flatten(), strict=True))
    totals = np.concatenate([[0], np.cumsum(as_numpy(fields["sampled"].flatten()))])
    tokens = totals[row_ends(fields["sampled"])]
    ends, stops, versions = row_ends(turns), fields["stop"].to_pylist(), as_numpy(fields["version"])
    return [
        {
            "turns": end - start,
            "tokens": int(tokens[end] - tokens[start]),
            "cut": "length" in stops[start:end],
            "versions": [int(versions[start:end].min()), int(versions[start:end].max())] if end > start else None,
        }
        for start, end in pairwise(ends)
    ]
