"""Saved checkpoints: list, choose, delete and prune them, and set their expiry.

Invariant: a checkpoint is selected only by its path, by its run, or with all checkpoints of the account.

In this module, `run` is a run's name or folder, and `note` receives messages while the service does not answer.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, cast, get_args

from rlkit._util.files import json_lines
from rlkit._util.paths import runs_dir
from rlkit.config.loading.run_config import find_run, load_run_config
from rlkit.config.schema import ServiceConfig
from rlkit.errors import RlkitError, UsageError, did_you_mean
from rlkit.store import checkpoints
from rlkit.store.history import read_metrics
from rlkit.tinker_client.connect import connect
from rlkit.tinker_client.stored_checkpoint import StoredCheckpoint
from rlkit.training.from_config import make_model_selection
from rlkit.training.model_selection import ModelSelection
from rlkit.types import Checkpoint, Json

type Kind = Literal["training", "sampler", "external"]
type Note = Callable[[str], None]

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(m|h|d|w)")
_UNIT_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_age(text: str) -> float:
    """Return an age such as `90m`, `12h`, `7d` or `2w` in seconds; UsageError for another text."""
    age = _AGE.fullmatch(text.strip())
    if age is None:
        raise UsageError(f"{text!r} is not an age: write 90m, 12h, 7d or 2w")
    return float(age[1]) * _UNIT_S[age[2]]


@dataclass(frozen=True, slots=True)
class CheckpointFilter:
    """Selection of checkpoints by kind and age."""

    kind: Kind | None = None  # kind to select; None for all
    min_age_s: float | None = None  # minimum age in seconds; None for any
    now: float = field(default_factory=time.time)  # current time in seconds since the epoch

    @classmethod
    def parse(cls, kind: str | None, older_than: str | None) -> CheckpointFilter:
        """Make a filter from the options of the command line; UsageError if the kind or the age is invalid."""
        kinds = get_args(Kind.__value__)
        if kind is not None and kind not in kinds:
            raise UsageError(f"--kind: {kind!r} is not one of {', '.join(kinds)}.{did_you_mean(kind, kinds)}")
        return cls(cast("Kind | None", kind), None if older_than is None else parse_age(older_than))

    @property
    def selects_all(self) -> bool:
        """True if the filter selects every checkpoint."""
        return self.kind is None and self.min_age_s is None

    def select(self, stored: Iterable[StoredCheckpoint]) -> list[StoredCheckpoint]:
        """Return the checkpoints that match."""
        before = math.inf if self.min_age_s is None else self.now - self.min_age_s
        return [each for each in stored if self.kind in (None, each.kind) and each.created < before]


@dataclass(frozen=True, slots=True)
class CheckpointSelection:
    """Checkpoints to delete or to change."""

    service: ServiceConfig
    checkpoints: Sequence[StoredCheckpoint]
    runs: tuple[Path, ...] = ()  # folders of the runs named by the user


@dataclass(frozen=True, slots=True)
class ChosenCheckpoint:
    """Checkpoint of a run, or a `tinker://` path."""

    path: str  # `tinker://` path of the training state, or the path that the user named
    service: ServiceConfig
    run: Path | None = None  # folder of the run; None for a path
    checkpoint: Checkpoint | None = None  # the run's record of the checkpoint; None for a path


async def _list_stored_checkpoints(service: ServiceConfig, note: Note) -> Sequence[StoredCheckpoint]:
    async with connect(service, note=note, session=False) as connection:
        return await connection.list_checkpoints()


async def list_checkpoints(
    run: str | Path | None = None,
    *,
    checkpoint_filter: CheckpointFilter,
    note: Note = lambda message: None,
) -> list[dict[str, Json]]:
    """Describe the checkpoints of the account or of a run, newest first.

    The checkpoints of a run also have `step`, `best` and `exists`. `exists` is false if the service has deleted the
    checkpoint.
    """
    directory = None if run is None else find_run(run)
    service = ServiceConfig() if directory is None else load_run_config(directory).service
    selected = checkpoint_filter.select(await _list_stored_checkpoints(service, note))
    if directory is None:
        return [asdict(checkpoint) for checkpoint in selected]
    stored_by_path = {checkpoint.path: checkpoint for checkpoint in selected}
    saved = checkpoints(directory)
    best = _load_selection(directory).best_checkpoint(saved)
    rows = list[dict[str, Json]]()
    for checkpoint in reversed(saved):
        stored = stored_by_path.get(checkpoint.state)
        if stored is not None or checkpoint_filter.selects_all:
            row = {"step": checkpoint.step, "best": checkpoint == best, "exists": stored is not None}
            rows.append({**row, "path": checkpoint.state, **({} if stored is None else asdict(stored))})
    return rows


def choose_checkpoint(name: str, *, step: int | None = None, best: bool = False) -> ChosenCheckpoint:
    """Return the checkpoint at a `tinker://` path, or a checkpoint of a run: of a step, the best, or the newest.

    Raises:
        UsageError: the run has no such checkpoint.
    """
    if name.startswith("tinker://"):
        if step is not None or best:
            raise UsageError("--step and --best apply to the checkpoints of a run: leave them out")
        return ChosenCheckpoint(name, ServiceConfig())
    run = find_run(name)
    service, saved = load_run_config(run).service, checkpoints(run)
    if step is not None and best:
        raise UsageError("--step and --best exclude each other: leave out one of them")
    if not saved:
        raise UsageError(f"{run.name} has no checkpoints: none was saved, or all were deleted")
    chosen = saved[-1]
    if step is not None:
        chosen = next((checkpoint for checkpoint in saved if checkpoint.step == step), None)
    elif best:
        chosen = _load_selection(run).best_checkpoint(saved)
    if chosen is None and best:
        raise UsageError(f"--best: no checkpoint of {run.name} has a value of best.metric; choose one with --step")
    if chosen is None:
        steps = ", ".join(str(checkpoint.step) for checkpoint in saved)
        raise UsageError(f"--step: {run.name} has no checkpoint of step {step}; it has {steps}")
    return ChosenCheckpoint(chosen.state, service, run, chosen)


async def describe_checkpoint(chosen: ChosenCheckpoint, *, note: Note = lambda message: None) -> dict[str, Json]:
    """Return the details of a checkpoint as JSON; UsageError if the service does not have it."""
    async with connect(chosen.service, note=note, session=False) as connection:
        model = await connection.model_of(chosen.path)
        stored = await connection.list_checkpoints()
    run, saved = chosen.run, chosen.checkpoint
    details: dict[str, Json] = {"path": chosen.path, "model": model}
    if run is not None and saved is not None:
        details = {"run": run.name, "step": saved.step, **details, "sampler": saved.sampler}
    return details | next((asdict(known) for known in stored if known.path == chosen.path), dict[str, Json]())


async def select_checkpoints(
    names: Sequence[str],
    *,
    select_all: bool = False,
    checkpoint_filter: CheckpointFilter,
    note: Note = lambda message: None,
) -> CheckpointSelection:
    """Select checkpoints by run or path, or all checkpoints of the account.

    Args:
        names: run names, run folders, or `tinker://` paths.
        select_all: select from all checkpoints of the account instead.
        checkpoint_filter: further restriction of the selection.

    Raises:
        UsageError: `names` is empty, a run or checkpoint does not exist, or the runs are on different services.
    """
    if select_all and names:
        raise UsageError("--all selects every checkpoint of the account: leave out the names, or --all")
    if not select_all and not names:
        raise UsageError("name runs or tinker:// paths, or use --all for every checkpoint of the account")
    paths = {name for name in names if name.startswith("tinker://")}
    runs = tuple(find_run(name) for name in names if name not in paths)
    services = [load_run_config(run).service for run in runs] or [ServiceConfig()]
    if any(service != services[0] for service in services):
        raise UsageError("the runs are on different services: name them one at a time")
    saved = {path for run in runs for checkpoint in checkpoints(run) for path in (checkpoint.state, checkpoint.sampler)}
    stored = await _list_stored_checkpoints(services[0], note)
    if missing := sorted(paths - {checkpoint.path for checkpoint in stored}):
        raise UsageError(f"the service has no checkpoint {missing[0]}")
    selected = [each for each in checkpoint_filter.select(stored) if select_all or each.path in paths | saved]
    return CheckpointSelection(services[0], selected, runs)


async def select_superfluous(
    run: str | Path, *, keep_last: int = 1, keep_best: int = 1, note: Note = lambda message: None
) -> CheckpointSelection:
    """Select the checkpoints of a run that are neither among the newest nor among the best by `best.metric`."""
    directory = find_run(run)
    service = load_run_config(directory).service
    stored = {checkpoint.path: checkpoint for checkpoint in await _list_stored_checkpoints(service, note)}
    saved = [checkpoint for checkpoint in checkpoints(directory) if checkpoint.state in stored]
    ranking = _load_selection(directory)
    ranking.keep_last, ranking.keep_best = keep_last, keep_best
    superfluous = ranking.superfluous(saved, last_step=max((checkpoint.step for checkpoint in saved), default=0))
    paths = [path for checkpoint in superfluous for path in (checkpoint.state, checkpoint.sampler) if path in stored]
    return CheckpointSelection(service, [stored[path] for path in paths], (directory,))


async def delete_checkpoints(
    selected: CheckpointSelection, *, note: Note = lambda message: None
) -> tuple[list[StoredCheckpoint], list[RlkitError]]:
    """Delete checkpoints permanently, and record it in their runs; return the deleted checkpoints and the errors."""
    deleted, failures = list[StoredCheckpoint](), list[RlkitError]()
    async with connect(selected.service, note=note, session=False) as connection:
        for checkpoint in selected.checkpoints:
            try:
                with suppress(UsageError):  # it was deleted in the meantime
                    await connection.delete(checkpoint.path)
                deleted.append(checkpoint)
            except RlkitError as error:
                failures.append(error)
    _record(deleted, selected.runs, lambda saved: {"step": saved.step, "deleted": saved.state})
    return deleted, failures


async def set_expiry(
    selected: CheckpointSelection, *, ttl_s: int | None, now: float, note: Note = lambda message: None
) -> None:
    """Set checkpoints to expire in `ttl_s` seconds (None for never), and record it in their runs."""
    expires = None if ttl_s is None else now + ttl_s
    async with connect(selected.service, note=note, session=False) as connection:
        for checkpoint in selected.checkpoints:
            await connection.set_ttl(checkpoint.path, ttl_s)
    _record(selected.checkpoints, selected.runs, lambda saved: asdict(replace(saved, expires=expires)))


def _load_selection(run: Path) -> ModelSelection:
    return make_model_selection(load_run_config(run), read_metrics(run / "metrics.jsonl"))


def _record(
    changed: Iterable[StoredCheckpoint], runs: Iterable[Path], line: Callable[[Checkpoint], Mapping[str, Json]]
) -> None:
    """Append a record for each changed checkpoint to its run, so that the run does not resume from a deleted one."""
    paths = {checkpoint.path for checkpoint in changed}
    for file in {*runs_dir().glob("*/checkpoints.jsonl"), *(run / "checkpoints.jsonl" for run in runs)}:
        with suppress(UsageError, OSError):  # the folder of another run is damaged
            for saved in checkpoints(file.parent):
                if saved.state in paths:
                    json_lines.append(file, line(saved))
