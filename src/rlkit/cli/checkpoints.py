"""`rlkit checkpoints` and `rlkit export`.

Invariant: a deletion needs `--yes`, or a confirmation on a terminal after the checkpoints are listed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlkit.cli.common.guard import FAILED
from rlkit.cli.common.options import Best, CheckpointStep, Merged, NewFolder, OptionalRun, RunName, RunOrState, Yes
from rlkit.cli.common.output import Data, Output
from rlkit.cli.common.progress import report_periodically
from rlkit.cli.common.signals import run_terminable
from rlkit.errors import UsageError

if TYPE_CHECKING:
    from rlkit.tinker_client.stored_checkpoint import StoredCheckpoint
    from rlkit.tools.checkpoints import CheckpointSelection
    from rlkit.tools.export import ExportForm

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN|PATH]…", help="Run names, run folders, or tinker:// paths.", show_default=False),
]
Kind = Annotated[str | None, typer.Option(help="Select weights by kind: training, sampler or external (for peft).")]
OlderThan = Annotated[str | None, typer.Option(metavar="AGE", help="Select checkpoints older than this, such as 12h.")]
All = Annotated[bool, typer.Option("--all", help="Select every checkpoint of the account.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the affected checkpoints, but change nothing.")]

_DAY_S = 86400
_MIB = 2**20
_SUMMARIES = {"adapter": "the adapter is", "merged": "the merged model is", "raw": "the service's files are"}


def list_all(output: Output, run: OptionalRun = None, *, kind: Kind = None, older_than: OlderThan = None) -> None:
    """List the checkpoints on the service, newest first.

    With RUN, list only the checkpoints of that run.
    """
    from rlkit.tools.checkpoints import CheckpointFilter, list_checkpoints

    rows = run_terminable(
        list_checkpoints(run, checkpoint_filter=CheckpointFilter.parse(kind, older_than), note=output.note)
    )
    output.result(rows, "\n".join(map(_line, rows)) or "there are no checkpoints")


def show(
    output: Output,
    name: Annotated[str, typer.Argument(metavar="RUN|PATH", help="Run name, run folder, or tinker:// path.")],
    *,
    step: CheckpointStep = None,
    best: Best = False,
) -> None:
    """Print the details of a checkpoint."""
    from rlkit.tools.checkpoints import choose_checkpoint, describe_checkpoint

    checkpoint = choose_checkpoint(name, step=step, best=best)
    details = run_terminable(describe_checkpoint(checkpoint, note=output.note))
    lines = [f"{key.removesuffix('_bytes'):<8} {_field(key, value)}" for key, value in details.items()]
    output.result(details, "\n".join(lines))


def delete(
    output: Output,
    names: Names = None,
    *,
    select_all: All = False,
    kind: Kind = None,
    older_than: OlderThan = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> int:
    """Delete checkpoints on the service permanently.

    The command lists them and asks for confirmation first.
    """
    from rlkit.tools.checkpoints import CheckpointFilter, select_checkpoints

    checkpoint_filter = CheckpointFilter.parse(kind, older_than)
    selection = run_terminable(
        select_checkpoints(names or [], select_all=select_all, checkpoint_filter=checkpoint_filter, note=output.note)
    )
    return _delete(output, selection, yes=yes, dry_run=dry_run)


def prune(
    output: Output,
    run: RunName,
    *,
    keep_last: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")] = 1,
    keep_best: Annotated[int, typer.Option(min=0, help="Number of best checkpoints to keep as well.")] = 1,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> int:
    """Delete all checkpoints of a run except the newest and the best.

    The command lists them and asks for confirmation first.
    """
    from rlkit.tools.checkpoints import select_superfluous

    selection = run_terminable(select_superfluous(run, keep_last=keep_last, keep_best=keep_best, note=output.note))
    return _delete(output, selection, yes=yes, dry_run=dry_run)


def ttl(
    output: Output,
    names: Names = None,
    *,
    days: Annotated[
        float | None,
        typer.Option(min=0.042, max=3650, help="Days until the service deletes the checkpoints; at least an hour."),
    ] = None,
    never: Annotated[bool, typer.Option("--never", help="Never let the checkpoints expire.")] = False,
    select_all: All = False,
    kind: Kind = None,
    older_than: OlderThan = None,
    dry_run: DryRun = False,
) -> None:
    """Set the time at which checkpoints expire."""
    from rlkit.tools.checkpoints import CheckpointFilter, select_checkpoints, set_expiry

    if (days is None) != never:
        raise UsageError("give the time of expiry: --days N, or --never")
    checkpoint_filter = CheckpointFilter.parse(kind, older_than)
    selection = run_terminable(
        select_checkpoints(names or [], select_all=select_all, checkpoint_filter=checkpoint_filter, note=output.note)
    )
    ttl_s = None if days is None else round(days * _DAY_S)
    expires = None if ttl_s is None else checkpoint_filter.now + ttl_s
    checkpoints = [replace(checkpoint, expires=expires) for checkpoint in selection.checkpoints]
    expiry = "never" if days is None else f"in {days:g} days"
    if dry_run or not checkpoints:
        _print(output, checkpoints, f"would expire {expiry}", changed=0)
        return
    run_terminable(set_expiry(selection, ttl_s=ttl_s, now=checkpoint_filter.now, note=output.note))
    _print(output, checkpoints, f"expire {expiry}", changed=len(checkpoints))


def download(
    output: Output, name: RunOrState, directory: NewFolder, *, step: CheckpointStep = None, best: Best = False
) -> None:
    """Download the files of a checkpoint in the service's format."""
    _write(output, name, directory, "raw", step=step, best=best)


def export(
    output: Output,
    name: RunOrState,
    directory: NewFolder,
    *,
    step: CheckpointStep = None,
    best: Best = False,
    merged: Merged = False,
) -> None:
    """Export the weights of a checkpoint for other programs."""
    _write(output, name, directory, "merged" if merged else "adapter", step=step, best=best)


def export_run(
    output: Output,
    run: RunOrState,
    *,
    to: Annotated[Path, typer.Option(metavar="DIR", help="Folder to create.")],
    step: CheckpointStep = None,
    best: Best = False,
    merged: Merged = False,
    episodes: Annotated[
        str | None,
        typer.Option(metavar="inspect", help="Export the episodes instead, for inspect_ai and inspect_scout."),
    ] = None,
) -> None:
    """Export the weights or the episodes of a run."""
    if episodes is not None:
        if step is not None or best or merged:
            raise UsageError("--step, --best and --merged select weights: leave them out with --episodes")
        _write_episodes(output, run, to, episodes)
        return
    _write(output, run, to, "merged" if merged else "adapter", step=step, best=best)


def _write(output: Output, name: str, directory: Path, form: ExportForm, *, step: int | None, best: bool) -> None:
    from rlkit.tools.checkpoints import choose_checkpoint
    from rlkit.tools.export import export

    checkpoint = choose_checkpoint(name, step=step, best=best)
    output.note(f"{'downloading' if form == 'raw' else 'exporting'} {checkpoint.path}")
    run_terminable(export(checkpoint.path, directory, form=form, service=checkpoint.service, note=output.note))
    output.result(
        {"checkpoint": checkpoint.path, "form": form, "directory": str(directory)}, f"{_SUMMARIES[form]} in {directory}"
    )


def _write_episodes(output: Output, run: str, directory: Path, form: str) -> None:
    from rlkit.tools.export_episodes import export_episodes

    if form != "inspect":
        raise UsageError(f"--episodes {form} is no form of episodes: write --episodes inspect")
    progress = deque(["reading the run"], maxlen=1)
    with report_periodically(lambda: output.note(progress[0])):
        count = export_episodes(run, directory, note=progress.append)
    summary = f"{count} episodes are in {directory}: `inspect view --log-dir {directory / 'logs'}`"
    output.result({"run": run, "form": form, "directory": str(directory), "episodes": count}, summary)


def _delete(output: Output, selection: CheckpointSelection, *, yes: bool, dry_run: bool) -> int:
    from rlkit.tools.checkpoints import delete_checkpoints

    checkpoints = selection.checkpoints
    if dry_run or not checkpoints:
        _print(output, checkpoints, "would be deleted", changed=0)
        return 0
    if not yes:
        output.note("\n".join(_line(asdict(checkpoint)) for checkpoint in checkpoints))
        if not output.confirm(f"delete {_amount(checkpoints)}, permanently?"):
            output.note("nothing was deleted")
            return 0
    deleted, failures = run_terminable(delete_checkpoints(selection, note=output.note))
    for failure in failures:
        output.error(str(failure))
    _print(output, deleted, "deleted", changed=len(deleted))
    return FAILED if failures else 0


def _print(output: Output, checkpoints: Sequence[StoredCheckpoint], verb: str, *, changed: int) -> None:
    rows = [asdict(checkpoint) for checkpoint in checkpoints]
    lines = [*map(_line, rows), f"{_amount(checkpoints)} {verb}"] if rows else ["there is no such checkpoint"]
    output.result({"changed_count": changed, "checkpoints": rows}, "\n".join(lines))


def _amount(checkpoints: Sequence[StoredCheckpoint]) -> str:
    size = sum(checkpoint.size_bytes or 0 for checkpoint in checkpoints) / _MIB
    return f"{len(checkpoints)} checkpoint{'' if len(checkpoints) == 1 else 's'} of {size:,.1f} MiB"


def _line(row: Mapping[str, Data]) -> str:
    """Render a checkpoint as `step 20      tinker://…  1.2 MiB  expires 2026-12-01  best`."""
    parts = [f"step {row['step']:<6}" if "step" in row else f"{row['kind']:<8}", str(row["path"])]
    if row.get("exists") is False:
        parts.append("gone")
    if isinstance(size := row.get("size_bytes"), int):
        parts.append(f"{size / _MIB:,.1f} MiB")
    if isinstance(expires := row.get("expires"), float):
        parts.append(f"expires {datetime.fromtimestamp(expires, UTC):%Y-%m-%d}")
    if row.get("best"):
        parts.append("best")
    return "  ".join(parts)


def _field(name: str, value: Data) -> str:
    if name in ("created", "expires"):
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M} UTC" if isinstance(value, float) else "never"
    if name == "size_bytes":
        return f"{value / _MIB:,.1f} MiB" if isinstance(value, int) else "unknown"
    return str(value)
