"""Folders of runs as a run leaves them, without a run."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlkit._util import files
from rlkit.config.loading.load import load_config
from rlkit.config.loading.resolved import show_lines
from rlkit.store import table
from rlkit.store.history import table_path
from rlkit.token_records.pieces import PieceWriter, pieces_path
from rlkit.types import Group, Json, TokenPiece
from tests.builders import episode, turn

MESSAGES: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is it?"},
    {
        "role": "assistant",
        "content": "",
        "thinking": "hm",
        "tool_calls": [{"id": "c", "name": "look", "arguments": {"at": "it"}}],
    },
    {"role": "tool", "content": "a cat", "tool_call_id": "c"},
    {"role": "assistant", "content": "A cat."},
]


def write_run(
    directory: Path, *, steps: int = 3, status: str = "completed", settings: Mapping[str, object] | None = None
) -> Path:
    """A run of some steps, with the evaluation before the first."""
    resolved = load_config([], settings={"envs": {"arithmetic": {}}, **(settings or {})}, environ={})
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text("\n".join(show_lines(resolved)) + "\n")
    (directory / "run.json").write_text(json.dumps({"format": 2, "name": directory.name, "status": status}))
    (directory / "metrics.jsonl").write_text("")
    add_metrics(directory, 0)
    for step in range(1, steps + 1):
        write_step(directory, step)
    return directory


def write_step(directory: Path, step: int, *, info: Mapping[str, Json] | None = None, text: str = "four") -> None:
    """A step of four rollouts, one of which failed and was played again."""
    add_metrics(directory, step)
    write_table(directory, step, info=info, text=text)


def add_metrics(directory: Path, step: int) -> None:
    """A line of metrics, with one that is not finite."""
    record = {"step": step, "env/sums/reward/mean": step / 10, "time/step_s": 1.5, "optim/odd": None}
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def write_table(directory: Path, step: int, *, info: Mapping[str, Json] | None = None, text: str = "four") -> None:
    pieces = {1: "what is ", 2: "2+2? ", (token := 3 + zlib.crc32(text.encode()) % 1000): text}
    writer = PieceWriter(pieces_path(directory), lambda token: TokenPiece(pieces[token].encode(), False))
    writer.add([np.array(list(pieces), np.int32)])
    turns = [turn([1, 2], [token])]
    played = [
        replace(episode(reward, member=member, turns=turns), info=info or {})
        for member, reward in enumerate((1.0, 0.0, 0.5))
    ]
    failed = replace(episode(None, member=2), error="the grader died")
    played[2] = replace(played[2], attempt=1)
    groups = [
        table.RecordedGroup(Group("sums", "2+2", 2 * step, tuple(played)), True, [*played, failed]),
        table.RecordedGroup(Group("others", "cats", 2 * step + 1, (episode(1.0),)), True, [episode(1.0)]),
    ]
    groups[1] = replace(groups[1], attempts=groups[1].group.episodes)
    files.make_folder(table_path(directory, step).parent)
    table.write(table_path(directory, step), groups)
