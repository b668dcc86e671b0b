"""The best constructions of a run, each with its program and its certificate, in the run's folder.

Invariant: a record is on the disk before the rollout that found it ends. Whatever is killed later, it stays, and a
construction is a record at most once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np

from rlkit._util import files
from rlkit.envs.discovery.problem import Certificate, Construction, Problem
from rlkit.envs.discovery.state import State
from rlkit.types import Json

_ENDING = ".record.json"
_FORMAT = 1
_LOCKS: dict[Path, threading.Lock] = {}
"""By folder; all rollouts of this process share them."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A construction that was better than all before it.

    Args:
        options: settings from which the problem is made again.
        task: id of the task that found it.
        parent: id of the state that its program started from.
        polished: whether a local search improved what the program returned.
        name: name of its file, without the ending.
    """

    problem: str
    options: Mapping[str, Json]
    symbol: str
    value: float
    construction: Construction
    certificate: Certificate | None
    task: str
    parent: str | None
    program: str
    polished: bool
    name: str

    @property
    def state(self) -> State:
        """The construction as an archive holds it."""
        return State(self.construction, self.value, self.parent, None, self.program, polished=self.polished)

    def __str__(self) -> str:
        size = "x".join(map(str, self.construction.shape))
        polished = ", polished by a local search" if self.polished else ""
        claim = "" if self.certificate is None else f"\n    {self.certificate.claim}"
        return f"{self.symbol} = {self.value:.12g}, {size} values, of {self.task}{polished}{claim}"

    def to_json(self) -> dict[str, Json]:
        """Return the record as JSON, without its construction and its program."""
        return {
            "value": self.value,
            "symbol": self.symbol,
            "problem": self.problem,
            "task": self.task,
            "parent": self.parent,
            "polished": self.polished,
            "shape": list(self.construction.shape),
            "certificate": self.certificate and asdict(self.certificate),
            "file": self.name,
        }


def offer(folder: Path, state: State, problem: Problem, *, options: Mapping[str, Json], task: str) -> bool:
    """Save a state if it is better than every record in the folder; whether it was.

    What the search began with is no record, and is not looked at here.

    Raises:
        OSError: it cannot be written.
    """
    with _LOCKS.setdefault(folder, threading.Lock()):  # atomic, unlike functools.cache
        paths = _paths(folder)
        best = json.loads(paths[-1].read_text())["value"] if paths else None  # each is better than all before it
        if best is not None and not problem.better(state.value, best):
            return False
        proven = problem.certificate(state.construction)
        held: dict[str, Json] = {
            "format": _FORMAT,
            "problem": problem.name,
            "options": dict(options),
            "symbol": problem.symbol,
            "minimise": problem.minimise,
            "value": state.value,
            "certificate": proven and asdict(proven),
            "task": task,
            "parent": state.parent,
            "polished": state.polished,
            "program": state.program,
            "values": cast("Json", state.construction.tolist()),
        }
        files.write_text(folder / f"{len(paths) + 1:04d}-{state.id}{_ENDING}", json.dumps(held))
        return True


def read(folder: Path) -> list[Record]:
    """The records of a folder, the best first."""
    paths = reversed(_paths(folder))
    return [_record(json.loads(path.read_text()), path.name.removesuffix(_ENDING)) for path in paths]


def _record(held: Mapping[str, Json], name: str) -> Record:
    proven = cast("Mapping[str, str] | None", held["certificate"])
    return Record(
        str(held["problem"]),
        cast("Mapping[str, Json]", held["options"]),
        str(held["symbol"]),
        float(cast("float", held["value"])),
        np.asarray(held["values"], np.float64),
        None if proven is None else Certificate(**proven),
        str(held["task"]),
        cast("str | None", held["parent"]),
        str(held["program"]),
        bool(held["polished"]),
        name,
    )


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{_ENDING}"))
