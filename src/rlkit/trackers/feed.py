# pyarrow has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
"""A run as it stands in its folder, step by step, for whoever shows it elsewhere.

Invariant: what is read is what was written down, in order and each step once; no text that leaves this module holds a
credential that has a well-known shape or is in the environment under the name of a secret.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlkit.errors import UsageError

if TYPE_CHECKING:
    from rlkit.types import Json


@dataclass(frozen=True, slots=True)
class Told:
    """A run as a whole.

    Args:
        name: of the run.
        directory: its folder.
        config: the whole configuration, without secrets.
        status: `running`, or how it ended.
    """

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
class Said:
    """One completion of a rollout, as text.

    Args:
        prompt: what was added to the turn before.
        completion: what the model said.
        stop: why it ended.
        version: optimiser steps of the weights that said it.
        reward: its own, if it has one.
    """

    prompt: str
    completion: str
    stop: str
    version: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class Rollout:
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
    turns: tuple[Said, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a run.

    Args:
        number: of the step; 0 is the evaluation before the first.
        metrics: finite ones only.
        table: the file of its episodes, if there is one.
    """

    number: int
    metrics: Mapping[str, float]
    table: Path | None

    def rollouts(self) -> list[Rollout]:
        """The rollouts of the groups that were trained on, or were dropped.

        Raises:
            UsageError: their table is damaged.
        """
        return [] if self.table is None else read_rollouts(self.table)


def clean(text: str) -> str:
    """`text` without credentials."""
    from rlkit._util.redaction import redact
    from rlkit.config.loading.secrets import redact as redact_shapes

    return redact(redact_shapes(text))


def cleaned(value: Json) -> Json:
    """A value of JSON in which every text is clean."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(key): cleaned(inner) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return [cleaned(inner) for inner in value]
    return value


def told(directory: Path) -> Told:
    """What a run's folder says of the run.

    Raises:
        UsageError: its files are damaged.
    """
    import yaml

    from rlkit.store import lines

    about = lines.read_object(directory / "run.json")
    try:
        config: object = yaml.safe_load((directory / "config.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{directory / 'config.yaml'} is damaged: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{directory / 'config.yaml'} is damaged: it is no mapping")
    known = cast("Mapping[str, Json]", cleaned(cast("Json", config)))
    return Told(directory.name, directory, known, str(about.get("status", "running")))


class Feed:
    """The steps of a run, as they are written down.

    Args:
        directory: of the run.
        after: the last step that is known already; −1 for none.
    """

    def __init__(self, directory: Path, *, after: int = -1) -> None:
        self._directory = directory
        self._after = after
        self._offset = 0
        self._waiting: list[tuple[int, dict[str, float]]] = []

    def steps(self, *, ended: bool) -> Iterator[Step]:
        """The steps that are there by now and have not been given yet.

        A step's table is written behind the run's back, a moment after its line of metrics.

        Args:
            ended: nothing is written any more, so no table is waited for.

        Raises:
            UsageError: the metrics are damaged.
        """
        self._read()
        while self._waiting:
            number, metrics = self._waiting[0]
            table = _table_path(self._directory, number)
            if number > 0 and not ended and not table.exists():
                return
            del self._waiting[0]
            self._after = number
            yield Step(number, metrics, table if table.exists() else None)

    def _read(self) -> None:
        path = self._directory / "metrics.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        newest = self._waiting[-1][0] if self._waiting else self._after
        for line in whole.splitlines():
            try:
                found = cast("dict[str, Any]", json.loads(line))
                number = int(found.pop("step"))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UsageError(f"{path} is damaged: {line[:40]!r} is no step") from error
            if number > newest:
                newest = number
                finite = {key: float(value) for key, value in found.items() if isinstance(value, int | float)}
                self._waiting.append((number, finite))


def _table_path(directory: Path, step: int) -> Path:
    from rlkit.store.history import table_path

    return table_path(directory, step)


_COLUMNS = ["position", "draw", "env", "task", "member", "final", "status", "reward", "error", "seconds", "metrics"]
_SAID = ["prompt_text", "completion_text", "stop", "version", "reward"]


def read_rollouts(path: Path) -> list[Rollout]:
    """The rollouts in a table of episodes, as text; attempts that were played again are left out.

    Raises:
        UsageError: it cannot be read.
    """
    import pyarrow.parquet as pq

    columns = [*_COLUMNS, "info", *(f"turns.list.element.{name}" for name in _SAID)]
    try:
        rows = cast("list[dict[str, Any]]", pq.ParquetFile(path).read(columns).to_pylist())
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    rows = sorted((row for row in rows if row["final"]), key=lambda row: (row["position"], row["member"]))
    return [_rollout(row) for row in rows]


def _rollout(row: Mapping[str, Any]) -> Rollout:
    return Rollout(
        env=row["env"],
        task=clean(row["task"]),
        draw=row["draw"],
        member=row["member"],
        status=row["status"],
        reward=row["reward"],
        error=None if row["error"] is None else clean(row["error"]),
        seconds=row["seconds"],
        metrics=json.loads(row["metrics"]),
        info=cast("Mapping[str, Json]", cleaned(json.loads(row["info"]))),
        turns=tuple(
            Said(
                clean(turn["prompt_text"]),
                clean(turn["completion_text"]),
                turn["stop"],
                turn["version"],
                turn["reward"],
            )
            for turn in row["turns"] or ()
        ),
    )
