"""Checkpoints of a service and of its runs: list, choose, delete and prune them, and set when they expire.

Invariant: a checkpoint is selected only by its own path, by its run, or by asking for all of an account.

A `run` is a name or a folder. A `note` receives one line for the user while the service does not answer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, cast, get_args

from rlkit._util.paths import runs_dir
from rlkit.config.schema import ServiceConfig
from rlkit.errors import RlkitError, UsageError, did_you_mean
from rlkit.service import StoredCheckpoint
from rlkit.service.connect import connect
from rlkit.store import checkpoints, jsonl
from rlkit.store.metadata import find_run, load_run_config
from rlkit.training.from_config import make_model_selection
from rlkit.training.model_selection import ModelSelection
from rlkit.types import Checkpoint, Json

type Kind = Literal["training", "sampler", "external"]
type Note = Callable[[str], None]

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(m|h|d|w)")
_UNIT_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_age(text: str) -> float:
    """Return the seconds of an age such as `90m`, `12h`, `7d` or `2w`.

    Raises:
        UsageError: the text is no age.
    """
    age = _AGE.fullmatch(text.strip())
    if age is None:
        raise UsageError(f"{text!r} is no age: write it as 90m, 12h, 7d or 2w")
    return float(age[1]) * _UNIT_S[age[2]]


@dataclass(frozen=True, slots=True)
class CheckpointFilter:
    """Select checkpoints by kind and age.

    Args:
        kind: None for all kinds.
        older_s: least age in seconds; None for any.
        now: seconds since the epoch.
    """

    kind: Kind | None = None
    older_s: float | None = None
    now: float = field(default_factory=time.time)

    @classmethod
    def parse(cls, kind: str | None, older_than: str | None) -> CheckpointFilter:
        """Make a filter of the words of a command line.

        Raises:
            UsageError: there is no such kind, or the age is none.
        """
        kinds = get_args(Kind.__value__)
        if kind is not None and kind not in kinds:
            raise UsageError(f"--kind: {kind!r} is none of {', '.join(kinds)}.{did_you_mean(kind, kinds)}")
        return cls(cast("Kind | None", kind), None if older_than is None else parse_age(older_than))

    @property
    def selects_all(self) -> bool:
        """True if it leaves nothing out."""
        return self.kind is None and self.older_s is None

    def select(self, stored: Iterable[StoredCheckpoint]) -> list[StoredCheckpoint]:
        """Return the checkpoints of this kind and age."""
        return [
            checkpoint
            for checkpoint in stored
            if (self.kind is None or checkpoint.kind == self.kind)
            and (self.older_s is None or checkpoint.created < self.now - self.older_s)
        ]


@dataclass(frozen=True, slots=True)
class CheckpointSelection:
    """Checkpoints that a service keeps, selected to be changed.

    Args:
        service: keeps the checkpoints.
        checkpoints: the selected ones.
        runs: folders of the runs that were named.
        missing: named paths that the service does not have.
    """

    service: ServiceConfig
    checkpoints: Sequence[StoredCheckpoint]
    runs: tuple[Path, ...] = ()
    missing: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ChosenCheckpoint:
    """One checkpoint.

    Args:
        path: `tinker://` path of its training state, or as it was named.
        service: keeps it.
        run: folder of its run, if it was named by that.
        saved: the run's record of it, likewise.
    """

    path: str
    service: ServiceConfig
    run: Path | None = None
    saved: Checkpoint | None = None


async def list_stored_checkpoints(
    service: ServiceConfig, *, note: Note = lambda message: None
) -> Sequence[StoredCheckpoint]:
    """Return all checkpoints that a service keeps."""
    async with connect(service, note=note, session=False) as connection:
        return await connection.list_checkpoints()


async def list_checkpoints(
    run: str | Path | None = None, *, only: CheckpointFilter | None = None, note: Note = lambda message: None
) -> list[dict[str, Json]]:
    """Describe the checkpoints of the account, or those of a run, newest first.

    Those of a run come with `step`, `best` and `kept`, which is false for one that the service does not have any more.
    """
    only = only or CheckpointFilter()
    if run is None:
        return [
            asdict(checkpoint) for checkpoint in only.select(await list_stored_checkpoints(ServiceConfig(), note=note))
        ]
    directory = find_run(run)
    service = load_run_config(directory).service
    stored_by_path = {
        checkpoint.path: checkpoint for checkpoint in only.select(await list_stored_checkpoints(service, note=note))
    }
    saved = checkpoints(directory)
    best = _selection(directory).best_checkpoint(saved)
    rows = list[dict[str, Json]]()
    for checkpoint in reversed(saved):
        stored = stored_by_path.get(checkpoint.state)
        if stored is not None or only.selects_all:
            row = {"step": checkpoint.step, "best": checkpoint == best, "kept": stored is not None}
            rows.append({**row, "path": checkpoint.state, **({} if stored is None else asdict(stored))})
    return rows


def choose_checkpoint(name: str, *, step: int | None = None, best: bool = False) -> ChosenCheckpoint:
    """Return the checkpoint that a `tinker://` path names, or one of a run: of a step, the best, or the newest.

    Raises:
        UsageError: there is none.
    """
    if name.startswith("tinker://"):
        if step is not None or best:
            raise UsageError("--step and --best choose among the checkpoints of a run: leave them out")
        return ChosenCheckpoint(name, ServiceConfig())
    run = find_run(name)
    service, saved = load_run_config(run).service, checkpoints(run)
    if step is not None and best:
        raise UsageError("--step and --best are two choices: give one")
    if not saved:
        raise UsageError(f"{run.name} has saved no checkpoint, or has deleted all of them")
    chosen = saved[-1]
    if step is not None:
        chosen = next((checkpoint for checkpoint in saved if checkpoint.step == step), None)
    elif best:
        chosen = _selection(run).best_checkpoint(saved)
    if chosen is None and best:
        raise UsageError(f"--best: no checkpoint of {run.name} has a value of best.metric")
    if chosen is None:
        steps = ", ".join(str(checkpoint.step) for checkpoint in saved)
        raise UsageError(f"--step: {run.name} has no checkpoint of step {step}; it has {steps}")
    return ChosenCheckpoint(chosen.state, service, run, chosen)


async def describe_checkpoint(chosen: ChosenCheckpoint, *, note: Note = lambda message: None) -> dict[str, Json]:
    """Return all that is known of a checkpoint, as JSON. A UsageError says that the service does not have it."""
    async with connect(chosen.service, note=note, session=False) as connection:
        model = await connection.model_of(chosen.path)
        stored = await connection.list_checkpoints()
    known: dict[str, Json] = {"path": chosen.path, "model": model}
    if chosen.run is not None and chosen.saved is not None:
        known = {"run": chosen.run.name, "step": chosen.saved.step, **known, "sampler": chosen.saved.sampler}
    return known | next(
        (asdict(checkpoint) for checkpoint in stored if checkpoint.path == chosen.path), dict[str, Json]()
    )


async def select_checkpoints(
    names: Sequence[str],
    *,
    every: bool = False,
    only: CheckpointFilter | None = None,
    note: Note = lambda message: None,
) -> CheckpointSelection:
    """Select the checkpoints of runs and paths, or all of an account.

    Args:
        names: names of runs, their folders, or `tinker://` paths.
        every: select all of the account instead.
        only: selects some of them.

    Raises:
        UsageError: nothing is named, there is no such run, or the runs are on different services.
    """
    if every and names:
        raise UsageError("--all is every checkpoint of the account: leave the names out, or --all")
    if not every and not names:
        raise UsageError("name runs or tinker:// paths, or give --all for every checkpoint of the account")
    only = only or CheckpointFilter()
    paths = {name for name in names if name.startswith("tinker://")}
    runs = tuple(find_run(name) for name in names if name not in paths)
    services = [load_run_config(run).service for run in runs] or [ServiceConfig()]
    if any(service != services[0] for service in services):
        raise UsageError("the runs are on different services: name them one at a time")
    saved = {path for run in runs for checkpoint in checkpoints(run) for path in (checkpoint.state, checkpoint.sampler)}
    stored = await list_stored_checkpoints(services[0], note=note)
    missing = sorted(paths - {checkpoint.path for checkpoint in stored}) if only.selects_all else ()
    selected = [checkpoint for checkpoint in only.select(stored) if every or checkpoint.path in paths | saved]
    return CheckpointSelection(services[0], selected, runs, missing)


async def select_superfluous(
    run: str | Path, *, keep_last: int = 1, keep_best: int = 1, note: Note = lambda message: None
) -> CheckpointSelection:
    """Select the checkpoints of a run that are neither among the newest nor among the best by `best.metric`."""
    directory = find_run(run)
    service = load_run_config(directory).service
    stored = {checkpoint.path: checkpoint for checkpoint in await list_stored_checkpoints(service, note=note)}
    saved = [checkpoint for checkpoint in checkpoints(directory) if checkpoint.state in stored]
    ranking = _selection(directory)
    ranking.keep_last, ranking.keep_best = keep_last, keep_best
    spare = ranking.superfluous(saved, last_step=max((checkpoint.step for checkpoint in saved), default=0))
    paths = [path for checkpoint in spare for path in (checkpoint.state, checkpoint.sampler) if path in stored]
    return CheckpointSelection(service, [stored[path] for path in paths], (directory,))


async def delete_checkpoints(
    selected: CheckpointSelection, *, note: Note = lambda message: None
) -> tuple[list[StoredCheckpoint], list[RlkitError]]:
    """Delete checkpoints for good, record that in their runs, and return the deleted ones and what failed."""
    deleted, failures = list[StoredCheckpoint](), list[RlkitError]()
    async with connect(selected.service, note=note, session=False) as connection:
        for checkpoint in selected.checkpoints:
            try:
                with suppress(UsageError):  # it has gone meanwhile
                    await connection.delete(checkpoint.path)
                deleted.append(checkpoint)
            except RlkitError as error:
                failures.append(error)
    _record(deleted, selected.runs, lambda saved: {"step": saved.step, "deleted": saved.state})
    return deleted, failures


async def set_expiry(
    selected: CheckpointSelection, *, ttl_s: int | None, now: float | None = None, note: Note = lambda message: None
) -> None:
    """Let checkpoints expire `ttl_s` seconds from now, or never for None, and record that in their runs."""
    expires = None if ttl_s is None else (time.time() if now is None else now) + ttl_s
    async with connect(selected.service, note=note, session=False) as connection:
        for checkpoint in selected.checkpoints:
            await connection.set_ttl(checkpoint.path, ttl_s)
    _record(selected.checkpoints, selected.runs, lambda saved: asdict(replace(saved, expires=expires)))


def _selection(run: Path) -> ModelSelection:
    return make_model_selection(load_run_config(run), jsonl.read_metrics(run / "metrics.jsonl"))


def _record(
    changed: Iterable[StoredCheckpoint], runs: Iterable[Path], line: Callable[[Checkpoint], Mapping[str, Json]]
) -> None:
    """Write in the folders of runs what became of their checkpoints, so that they do not go on from what is gone."""
    paths = {checkpoint.path for checkpoint in changed}
    for file in {*runs_dir().glob("*/checkpoints.jsonl"), *(run / "checkpoints.jsonl" for run in runs)}:
        with suppress(UsageError, OSError):  # of another run, whose folder is damaged
            for saved in checkpoints(file.parent):
                if saved.state in paths:
                    jsonl.append(file, line(saved))
