"""`rlkit checkpoints`: looking at weights, and writing them to files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.cli.checkpoints.choosing import config_of
from rlkit.cli.common.arguments import run_directory
from rlkit.cli.common.output import Data, Output
from rlkit.cli.common.signals import run_terminable
from rlkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlkit.cli.checkpoints.choosing import Filter
    from rlkit.config.schema import Config, ServiceConfig
    from rlkit.service import Stored
    from rlkit.tools.export import Form
    from rlkit.types import Checkpoint

_MIB = 2**20

_MADE = {"adapter": "the adapter is", "merged": "the merged model is", "raw": "the service's files are"}


def show_all(run: str | None, output: Output, *, only: Filter) -> int:
    """Print the checkpoints that the service keeps, all of them or those of a run. Returns the exit code."""
    from rlkit.config.schema import ServiceConfig

    if run is None:
        rows = [row(one) for one in only.of(run_terminable(stored(ServiceConfig(), output.note)))]
    else:
        directory = run_directory(run)
        config = config_of(directory)
        kept = {one.path: one for one in only.of(run_terminable(stored(config.service, output.note)))}
        rows = [one for one in _of_run(directory, config, kept) if one["kept"] or only.takes_all]
    if output.json:
        output.data(rows)
    else:
        output.line("\n".join(map(line, rows)) or "there are no checkpoints")
    return 0


def show(what: str, output: Output, *, step: int | None, best: bool) -> int:
    """Print all that is known of one checkpoint. Returns the exit code."""
    chosen = choose(what, step=step, best=best)
    found, model = run_terminable(_known(chosen, output.note))
    sampler = {} if chosen.sampler is None else {"sampler": chosen.sampler}
    known: dict[str, Data] = {"path": chosen.path, "model": model, **sampler, **({} if found is None else row(found))}
    if chosen.run is not None:
        known = {"run": chosen.run.name, "step": chosen.step, **known}
    if output.json:
        output.data(known)
    else:
        output.line(
            "\n".join(f"{name.removesuffix('_bytes'):<8} {_shown(name, value)}" for name, value in known.items())
        )
    return 0


def export(what: str, directory: Path, output: Output, *, step: int | None, best: bool, form: Form) -> int:
    """Write the weights of a checkpoint to a folder. Returns the exit code."""
    from rlkit.tools.export import export

    chosen = choose(what, step=step, best=best)
    output.note(f"{'downloading' if form == 'raw' else 'exporting'} {chosen.path}")
    run_terminable(export(chosen.path, directory, form=form, service=chosen.service, note=output.note))
    if output.json:
        output.data({"checkpoint": chosen.path, "form": form, "directory": str(directory)})
    else:
        output.line(f"{_MADE[form]} in {directory}")
    return 0


@dataclass(frozen=True, slots=True)
class Chosen:
    """One checkpoint.

    Args:
        path: of its training state, or as it was given.
        service: that keeps it.
        run: the folder of its run, if it was given by that, and then its step and its weights for sampling.
    """

    path: str
    service: ServiceConfig
    run: Path | None = None
    step: int | None = None
    sampler: str | None = None


def choose(what: str, *, step: int | None, best: bool) -> Chosen:
    """The checkpoint that a path names, or that of a run: of a step, the best, or the newest.

    Raises:
        UsageError: there is none.
    """
    from rlkit.config.schema import ServiceConfig

    if what.startswith("tinker://"):
        if step is not None or best:
            raise UsageError("--step and --best choose among the checkpoints of a run: leave them out")
        return Chosen(what, ServiceConfig())
    run = run_directory(what)
    config = config_of(run)
    saved = _chosen(run, config, step=step, best=best)
    return Chosen(saved.state, config.service, run, saved.step, saved.sampler)


async def stored(service: ServiceConfig, note: Callable[[str], None]) -> Sequence[Stored]:
    """Return all checkpoints that a service keeps.

    Args:
        service: that keeps them.
        note: receives one line for the user while it does not answer.
    """
    from rlkit.service.connect import connect

    async with connect(service, note=note, session=False) as connection:
        return await connection.stored()


async def _known(chosen: Chosen, note: Callable[[str], None]) -> tuple[Stored | None, str]:
    from rlkit.service.connect import connect

    async with connect(chosen.service, note=note, session=False) as connection:
        model = await connection.model_of(chosen.path)
        every = await connection.stored()
    return next((one for one in every if one.path == chosen.path), None), model


def _chosen(directory: Path, config: Config, *, step: int | None, best: bool) -> Checkpoint:
    from rlkit.store import checkpoints, lines
    from rlkit.training.from_config import selection

    if step is not None and best:
        raise UsageError("--step and --best are two choices: give one")
    saved = checkpoints(directory)
    if not saved:
        raise UsageError(f"{directory.name} has saved no checkpoint, or has deleted all of them")
    if step is not None:
        found = next((one for one in saved if one.step == step), None)
        if found is None:
            known = ", ".join(str(one.step) for one in saved)
            raise UsageError(f"--step: {directory.name} has no checkpoint of step {step}; it has {known}")
        return found
    if best:
        found = selection(config, lines.numbers(directory / "metrics.jsonl")).best_of(saved)
        if found is None:
            raise UsageError(f"--best: no checkpoint of {directory.name} has a value of best.metric")
        return found
    return saved[-1]


def _of_run(directory: Path, config: Config, kept: Mapping[str, Stored]) -> list[dict[str, Data]]:
    """A row for each checkpoint of a run, newest first, whether or not the service still has it."""
    from rlkit.store import checkpoints, lines
    from rlkit.training.from_config import selection

    saved = checkpoints(directory)
    best = selection(config, lines.numbers(directory / "metrics.jsonl")).best_of(saved)
    rows = list[dict[str, Data]]()
    for one in reversed(saved):
        found = kept.get(one.state)
        first: dict[str, Data] = {"step": one.step, "best": one == best, "kept": found is not None}
        rows.append({**first, "path": one.state, **({} if found is None else row(found))})
    return rows


def row(found: Stored) -> dict[str, Data]:
    """What is known of a checkpoint, for JSON."""
    return {
        "path": found.path,
        "kind": found.kind,
        "created": found.created,
        "size_bytes": found.size_bytes,
        "expires": found.expires,
    }


def line(known: Mapping[str, Data]) -> str:
    """`step 20      tinker://…  1.2 MiB  expires 2026-12-01  best`."""
    parts = [f"step {known['step']:<6}" if "step" in known else f"{known['kind']:<8}", str(known["path"])]
    if known.get("kept") is False:
        parts.append("gone")
    if isinstance(size := known.get("size_bytes"), int):
        parts.append(f"{size / _MIB:,.1f} MiB")
    if isinstance(expires := known.get("expires"), float):
        parts.append(f"expires {datetime.fromtimestamp(expires, UTC):%Y-%m-%d}")
    if known.get("best"):
        parts.append("best")
    return "  ".join(parts)


def _shown(name: str, value: Data) -> str:
    if name in ("created", "expires"):
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M} UTC" if isinstance(value, float) else "never"
    if name == "size_bytes":
        return f"{value / _MIB:,.1f} MiB" if isinstance(value, int) else "unknown"
    return str(value)
