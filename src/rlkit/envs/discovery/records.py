"""Records of a run: its best constructions, each with its program and its certificate.

Invariant: a record is written before its rollout ends, so it survives a kill; it exists at most once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import cast

import numpy as np
from filelock import FileLock
from pydantic import TypeAdapter

from rlkit._util import files
from rlkit.envs.discovery.problem import Certificate, Construction, Problem
from rlkit.envs.discovery.state import State
from rlkit.types import Json

_SUFFIX = ".record.json"


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Construction that was better than all earlier ones.

    Args:
        options: settings that recreate the problem.
        values: numbers of the construction, nested by its axes.
        task: id of the task in which it was found.
        name: file name without the suffix.
        lineage: ids and values of the states that it comes from, its parent first, an initial state last.
    """

    problem: str
    options: Mapping[str, Json]
    symbol: str
    value: float
    values: Json
    certificate: Certificate | None
    task: str
    parent: str | None
    program: str
    polished: bool
    name: str
    lineage: Sequence[tuple[str, float]] = ()

    @property
    def construction(self) -> Construction:
        """The numbers as an array."""
        return np.asarray(cast("Sequence[float]", self.values), np.float64)

    @property
    def state(self) -> State:
        """State with the construction."""
        return State(self.construction, self.value, self.parent, None, self.program, polished=self.polished)

    def __str__(self) -> str:
        size = "x".join(map(str, self.construction.shape))
        polished = ", polished by a local search" if self.polished else ""
        claim = "" if self.certificate is None else f"\n    {self.certificate.claim}"
        return f"{self.symbol} = {self.value:.12g}, {size} values, of {self.task}{polished}{claim}"

    def to_json(self) -> dict[str, Json]:
        """Return the record as JSON, without its construction and its program."""
        content = _RECORD.dump_python(self, mode="json", exclude={"values", "program", "options", "name"})
        return {**content, "shape": list(self.construction.shape), "file": self.name}

    def to_arena(self, *, key: str) -> dict[str, Json]:
        """Return the record with the fields of a solution of EinsteinArena, its construction as `key`."""
        content = _RECORD.dump_python(self, mode="json", include={"problem", "options", "values", "certificate"})
        return {key: content.pop("values"), **content, "score": self.value}


_RECORD = TypeAdapter(Record)


def save_if_better(
    folder: Path, state: State, problem: Problem, *, task: str, lineage: Sequence[tuple[str, float]] = ()
) -> bool:
    """Save a state if it is better than every record in the folder; return True if it was saved.

    The caller compares it with the initial states of the search.

    Raises:
        OSError: the record cannot be written.
    """
    with FileLock(folder / ".lock"):  # rollouts of other processes save records too
        paths = _paths(folder)
        best: float | None = json.loads(paths[-1].read_text())["value"] if paths else None  # the last is the best
        if best is not None and not problem.is_better(state.value, best):
            return False
        record = Record(
            problem=problem.name,
            options=_keep_json_options(problem),
            symbol=problem.symbol,
            value=state.value,
            values=state.construction.tolist(),
            certificate=problem.certificate(state.construction),
            task=task,
            parent=state.parent,
            program=state.program,
            polished=state.polished,
            name=f"{len(paths) + 1:04d}-{state.id}",
            lineage=lineage,
        )
        content = json.dumps(_RECORD.dump_python(record, mode="json", exclude={"name"}))
        files.write_text(folder / f"{record.name}{_SUFFIX}", content)
        return True


def read_records(folder: Path) -> list[Record]:
    """Return the records of a folder, best first."""
    contents = ({**json.loads(path.read_text()), "name": path.name.removesuffix(_SUFFIX)} for path in _paths(folder))
    return [*map(_RECORD.validate_python, contents)][::-1]


def _keep_json_options(problem: Problem) -> dict[str, Json]:
    options = {field.name: getattr(problem, field.name) for field in fields(problem)} if is_dataclass(problem) else {}
    return {name: value for name, value in options.items() if isinstance(value, bool | int | float | str | None)}


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{_SUFFIX}"))
