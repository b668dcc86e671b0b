"""`rlkit train`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.cli.common.arguments import resolve, run_directory
from rlkit.cli.common.guard import BUDGET_REACHED, INTERRUPTED
from rlkit.cli.common.output import Data, Output, printable, redrawable
from rlkit.cli.common.signals import graceful
from rlkit.trackers import RunResult, Tracker
from rlkit.training.stop import StopSignal
from rlkit.types import Checkpoint

if TYPE_CHECKING:
    from rlkit.config import Resolved
    from rlkit.trackers.panel import PanelTracker

FINISHING = "finishing this step, then saving (Ctrl-C again to stop at once)"


def run(
    arguments: Sequence[str],
    output: Output,
    *,
    name: str | None,
    resume: bool,
    quiet: bool,
    panel: bool,
    openreward: bool = False,
) -> int:
    """Train, and print how it ended. Returns the exit code."""
    resolved = resolve(arguments, name=name)
    from rlkit.store import holds_run
    from rlkit.training.from_config import named_directory

    again = resume and holds_run(named_directory(resolved.config))
    return _train(resolved, output, directory=None, resume=again, quiet=quiet, panel=panel, openreward=openreward)


def resume(
    run: str, values: Sequence[str], output: Output, *, quiet: bool, panel: bool, openreward: bool = False
) -> int:
    """Go on with a run, and print how it ended. Returns the exit code."""
    from rlkit.store.about import recorded_config

    directory = run_directory(run)
    resolved = resolve([str(recorded_config(directory)), *values], name=directory.name)
    return _train(resolved, output, directory=directory, resume=True, quiet=quiet, panel=panel, openreward=openreward)


def _train(
    resolved: Resolved,
    output: Output,
    *,
    directory: Path | None,
    resume: bool,
    quiet: bool,
    panel: bool,
    openreward: bool,
) -> int:
    stop = StopSignal()
    drawn: PanelTracker | None = None

    def say(message: str) -> None:
        (output.note if drawn is None else drawn.note)(message)

    try:
        with graceful(stop.request, say, message=FINISHING, ready=lambda: stop.is_watched) as interruptible:
            if not quiet:
                output.note("going on with the run" if resume else "preparing the run")
            drawn = _panel(output) if panel and not quiet and _drawable(output) else None
            trackers = _trackers(output, drawn, quiet=quiet)
            from rlkit.training.trainer import RLTrainer

            if openreward:
                from rlkit.trackers.openreward import OpenRewardTracker

                trackers.append(OpenRewardTracker())
            trainer = RLTrainer(resolved, trackers=trackers, stop=stop, directory=directory, resume=resume)
            result = interruptible.run(trainer.train())
    finally:
        if drawn is not None:
            drawn.close()
    if output.json:
        output.data(_record(result))
    else:
        output.line(_summary(result))
    if result.status == "completed":
        return 0
    spent = result.status == "budget"
    more = [f"{result.reason.partition(':')[0]}=…"] if spent else []
    output.note(f"to go on: {shlex.join(['rlkit', 'resume', _known_as(result)])} {' '.join(more)}".rstrip())
    return BUDGET_REACHED if spent else INTERRUPTED


def _drawable(output: Output) -> bool:
    """Whether a panel on stderr would not be torn by what goes to stdout."""
    return redrawable(output.err) and not (output.json and output.out.isatty())


def _panel(output: Output) -> PanelTracker:
    from rich.console import Console

    from rlkit.trackers.panel import PanelTracker

    return PanelTracker(Console(file=output.err), clean=printable)


def _trackers(output: Output, panel: PanelTracker | None, *, quiet: bool) -> list[Tracker]:
    from rlkit.trackers.console import ConsoleTracker, JsonTracker

    trackers: list[Tracker] = []
    if panel is not None:
        trackers.append(panel)
    elif not quiet and not output.json:
        trackers.append(ConsoleTracker(output.note))
    if output.json:
        silent = panel is not None or quiet
        trackers.append(JsonTracker(output.data, say=output.silent if silent else output.note))
    return trackers


def _record(result: RunResult) -> dict[str, Data]:
    return {
        "run": result.name,
        "directory": str(result.directory),
        "status": result.status,
        "reason": result.reason,
        "steps": result.steps,
        "metrics": dict(result.metrics),
        "checkpoint": _saved(result.checkpoint),
        "best": _saved(result.best),
        "spent": result.spent and asdict(result.spent),
        "estimate": result.estimate and result.estimate.to_json(),
    }


def _saved(saved: Checkpoint | None) -> dict[str, Data] | None:
    if saved is None:
        return None
    return {"step": saved.step, "state": saved.state, "sampler": saved.sampler, "expires": saved.expires}


def _summary(result: RunResult) -> str:
    from rlkit.trackers.console import number, rewards, searches

    ended = "out of budget" if result.status == "budget" else result.status
    lines = [f"{ended} after {result.steps} steps: {result.directory}"]
    if last := rewards(result.metrics):
        lines.append("last rewards  " + "  ".join(f"{name} {number(value)}" for name, value in last.items()))
    lines += [f"best found    {name} {text}" for name, text in searches(result.metrics).items()]
    if result.checkpoint is not None:
        lines.append(f"checkpoint    {result.checkpoint.state}")
        lines.append(f"weights       {result.checkpoint.sampler}")
    if result.best is not None and result.best != result.checkpoint:
        lines.append(f"best weights  {result.best.sampler} (step {result.best.step})")
    if result.spent is not None:
        from rlkit.cli.rehearse import expected, used

        whole = result.status == "completed"  # the estimate is of all steps
        before = "" if result.estimate is None or not whole else f" (the dry run expected {expected(result.estimate)})"
        lines.append(f"used          {used(result.spent)}{before}")
    return "\n".join(lines)


def _known_as(result: RunResult) -> str:
    """The shortest word by which `rlkit resume` finds a run."""
    from rlkit._util.paths import runs_dir

    return result.name if result.directory == runs_dir() / result.name else str(result.directory)
