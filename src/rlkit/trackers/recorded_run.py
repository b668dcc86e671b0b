# pyarrow has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
"""A run as it stands in its folder, step by step, for whoever shows it elsewhere.

Invariant: what is read is what was written down, in order and each step once; no text that leaves this module holds a
credential that has a well-known shape or is in the environment under the name of a secret.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlkit._util.json_values import map_text
from rlkit.errors import UsageError

if TYPE_CHECKING:
    from rlkit.types import Json


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run as a whole: its configuration has no secrets, and its status is `running` or how it ended."""

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
        """The rank of its adapter."""
        return cast("Mapping[str, int]", self.config["lora"])["rank"]


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A completion of a rollout, as text.

    Args:
        prompt: text that was added to the turn before.
        version: optimiser steps of the weights that sampled the completion.
    """

    prompt: str
    completion: str
    stop: str
    version: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A rollout as it is shown: the last attempt at its place in its group."""

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
        """All turns as one text, as the model had it."""
        return "".join(f"{turn.prompt}{turn.completion}" for turn in self.turns)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step of a run.

    Args:
        number: 0 for the evaluation before the first step.
        metrics: finite ones only.
        table: file of its episodes, if there is one.
    """

    number: int
    metrics: Mapping[str, float]
    table: Path | None

    def rollouts(self) -> list[RecordedRollout]:
        """Return the rollouts of the groups that were trained on, or were dropped; UsageError if damaged."""
        return [] if self.table is None else read_rollouts(self.table)

    def sample_rollouts(self, count: int) -> list[RecordedRollout]:
        """Return `count` rollouts, drawn at random and always the same ones; 0 for all."""
        rollouts = self.rollouts()
        return rollouts if not 0 < count < len(rollouts) else random.Random(self.number).sample(rollouts, count)


def clean(text: str) -> str:
    """Return `text` without credentials."""
    from rlkit._util.redaction import redact
    from rlkit.config.loading.secrets import redact as redact_shapes

    return redact(redact_shapes(text))


def read_run(directory: Path) -> RecordedRun:
    """Return the run of a folder; UsageError if its files are damaged."""
    import yaml

    from rlkit.store import jsonl

    about = jsonl.read_object(directory / "run.json")
    try:
        config: object = yaml.safe_load((directory / "config.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{directory / 'config.yaml'} is damaged: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{directory / 'config.yaml'} is damaged: it is no mapping")
    known = cast("Mapping[str, Json]", map_text(cast("Json", config), clean, keys=True))
    return RecordedRun(directory.name, directory, known, str(about.get("status", "running")))


class StepReader:
    """The steps of a run after the step `after`, as they are written down; −1 for all of them."""

    def __init__(self, directory: Path, *, after: int = -1) -> None:
        self._directory = directory
        self._newest = after
        self._size = 0
        self._waiting = deque[tuple[int, dict[str, float]]]()

    def steps(self, *, has_ended: bool) -> Iterator[RecordedStep]:
        """Yield the steps that are there by now and were not yielded yet.

        A step's table is written behind the run's back, a moment after its line of metrics, and waited for unless the
        run has `ended`.
        """
        from rlkit.store.history import table_path

        self._read_metrics()
        while self._waiting:
            number, metrics = self._waiting[0]
            table = table_path(self._directory, number)
            exists = table.exists()
            if number > 0 and not has_ended and not exists:
                return
            self._waiting.popleft()
            yield RecordedStep(number, metrics, table if exists else None)

    def _read_metrics(self) -> None:
        from rlkit.store import jsonl

        path = self._directory / "metrics.jsonl"
        if not path.exists() or (size := path.stat().st_size) == self._size:
            return
        self._size = size
        for number, metrics in jsonl.read_metrics(path):
            if number > self._newest:
                self._newest = number
                self._waiting.append((number, metrics))


_COLUMNS = ["position", "draw", "env", "task", "member", "final", "status", "reward", "error", "seconds", "metrics"]
_TURN_COLUMNS = ["prompt_text", "completion_text", "stop", "version", "reward"]


def read_rollouts(path: Path) -> list[RecordedRollout]:
    """Return the rollouts in a table of episodes, as text, without attempts that were played again."""
    import pyarrow.parquet as pq

    columns = [*_COLUMNS, "info", *(f"turns.list.element.{name}" for name in _TURN_COLUMNS)]
    try:
        rows = cast("list[dict[str, Any]]", pq.ParquetFile(path).read(columns).to_pylist())
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    rows = sorted((row for row in rows if row["final"]), key=lambda row: (row["position"], row["member"]))
    return [_rollout(row) for row in rows]


def _rollout(row: Mapping[str, Any]) -> RecordedRollout:
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
        info=cast("Mapping[str, Json]", map_text(json.loads(row["info"]), clean, keys=True)),
        turns=tuple(
            RecordedTurn(clean(prompt), clean(completion), stop, version, reward)
            for prompt, completion, stop, version, reward in (
                [turn[name] for name in _TURN_COLUMNS] for turn in row["turns"] or ()
            )
        ),
    )
