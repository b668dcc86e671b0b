# pyarrow has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
"""Read a run from its folder, step by step, for trackers.

Invariant: each recorded step is read once, in order. Texts are redacted: they contain no credential of a well-known
shape and no value of a secret environment variable.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rlkit._util.files import json_lines
from rlkit._util.json_values import redact_object
from rlkit.config.loading.nodes import plain
from rlkit.config.loading.secrets import clean
from rlkit.config.loading.yaml_text import read_file
from rlkit.types import Json, TokenPiece


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run: its configuration without secrets, and its status, which is `running` or how the run ended."""

    name: str
    directory: Path
    config: Mapping[str, Json]
    status: str

    @property
    def model(self) -> str:
        """The model that is trained."""
        return str(self.config["model"])

    @property
    def lora_rank(self) -> int:
        """The rank of the adapter."""
        return cast("Mapping[str, int]", self.config["lora"])["rank"]


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn of a rollout, as text."""

    prompt: str  # text after the parent's completion, with the names of special tokens
    completion: str
    stop: str
    version: int  # version of the weights that sampled the completion
    reward: float | None
    parent: int | None  # index of the turn that this turn extends, if any
    tokens: tuple[int, int]  # numbers of tokens of the prompt and the completion
    is_demonstration: bool = False  # the completion was given and not sampled, so it has no log-probabilities


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A rollout, as trackers show it: the last attempt of a member of a group."""

    env: str
    task: str
    draw: int
    member: int
    status: str
    reward: float | None
    error: str | None
    seconds: float
    metrics: Mapping[str, float]
    info: Mapping[str, Json]
    turns: tuple[RecordedTurn, ...]

    @property
    def text(self) -> str:
        """All turns as one text, in the model's chat format."""
        return "".join(f"{turn.prompt}{turn.completion}" for turn in self.turns)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step of a run."""

    number: int  # 0 for the evaluation before the first step
    metrics: Mapping[str, float]  # finite metrics
    table: Path | None  # Parquet file of the step's episodes, if it exists

    def rollouts(self) -> list[RecordedRollout]:
        """Return the rollouts of the step's groups, dropped groups included; UsageError if the table is damaged."""
        return [] if self.table is None else read_rollouts(self.table)

    def sample_rollouts(self, count: int) -> list[RecordedRollout]:
        """Return a random sample of `count` rollouts (0 for all), which is the same at each call."""
        rollouts = self.rollouts()
        return rollouts if not 0 < count < len(rollouts) else random.Random(self.number).sample(rollouts, count)


def read_run(directory: Path) -> RecordedRun:
    """Return the run of a folder; UsageError if its files are damaged."""
    about = json_lines.read_object(directory / "run.json")
    config = cast("Mapping[str, Json]", plain(read_file(directory / "config.yaml")))
    redacted = redact_object(config, clean)
    return RecordedRun(directory.name, directory, redacted, str(about.get("status", "running")))


class StepReader:
    """Reader of the steps of a run after the step `after` (−1 for all), while they are written."""

    def __init__(self, directory: Path, *, after: int = -1) -> None:
        self._directory = directory
        self._newest = after
        self._read_bytes = 0  # size of metrics.jsonl when its last step was yielded

    def steps(self, *, has_ended: bool) -> Iterator[RecordedStep]:
        """Yield the recorded steps that were not yielded before.

        The table of a step is written in the background, after the step's metrics. Unless the run has ended, a step is
        yielded only after its table is written.
        """
        from rlkit.store.history import read_metrics, table_path

        path = self._directory / "metrics.jsonl"
        if not path.exists() or (size := path.stat().st_size) == self._read_bytes:
            return
        for number, metrics in read_metrics(path):
            if number <= self._newest:
                continue
            table = table_path(self._directory, number)
            exists = table.exists()
            if number > 0 and not has_ended and not exists:
                return
            self._newest = number
            yield RecordedStep(number, metrics, table if exists else None)
        self._read_bytes = size


_COLUMNS = ["position", "draw", "env", "task", "member", "final", "status", "reward", "error", "seconds", "metrics"]
_TURN_COLUMNS = ["stop", "version", "reward", "parent", "prompt", "completion", "logprobs"]


def read_rollouts(path: Path) -> list[RecordedRollout]:
    """Return the rollouts in a table of episodes of a run, without attempts that were retried."""
    from rlkit.token_records.list_columns import read_columns
    from rlkit.token_records.pieces import pieces_path, read_pieces

    columns = [*_COLUMNS, "info", *(f"turns.list.element.{name}" for name in _TURN_COLUMNS)]
    rows = cast("list[dict[str, Any]]", read_columns(path, columns).to_pylist())
    pieces = read_pieces(pieces_path(path.parents[2]))
    rows = sorted((row for row in rows if row["final"]), key=lambda row: (row["position"], row["member"]))
    return [_rollout(row, pieces) for row in rows]


def _rollout(row: Mapping[str, Any], pieces: Mapping[int, TokenPiece]) -> RecordedRollout:
    from rlkit.token_records.pieces import decode_pieces

    return RecordedRollout(
        env=row["env"],
        task=clean(row["task"]),
        draw=row["draw"],
        member=row["member"],
        status=row["status"],
        reward=row["reward"],
        error=None if row["error"] is None else clean(row["error"]),
        seconds=row["seconds"],
        metrics=json.loads(row["metrics"]),
        info=redact_object(json.loads(row["info"]), clean),
        turns=tuple(
            RecordedTurn(
                prompt=clean(decode_pieces(pieces, turn["prompt"])),
                completion=clean(decode_pieces(pieces, turn["completion"], with_special=False)),
                stop=turn["stop"],
                version=turn["version"],
                reward=turn["reward"],
                parent=turn["parent"],
                tokens=(len(turn["prompt"]), len(turn["completion"])),
                is_demonstration=any(map(math.isnan, turn["logprobs"][:1])),
            )
            for turn in row["turns"] or ()
        ),
    )
