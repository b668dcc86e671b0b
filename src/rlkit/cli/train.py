"""`rlkit train` and `rlkit resume`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlkit.cli.common.guard import BUDGET_REACHED, INTERRUPTED
from rlkit.cli.common.options import Configs, NoPanel, Quiet, RunName, Uploads
from rlkit.cli.common.output import Output, is_redrawable, sanitise
from rlkit.cli.common.signals import graceful_shutdown
from rlkit.errors import UsageError

if TYPE_CHECKING:
    from rlkit.config.loading.resolved import ResolvedConfig
    from rlkit.trackers import RunResult, Tracker
    from rlkit.trackers.panel import PanelTracker
    from rlkit.training.trainer import RLTrainer

FINISHING = "finishing this step, then saving (Ctrl-C again to stop immediately)"


def train(
    output: Output,
    config: Configs,
    *,
    name: Annotated[str | None, typer.Option(help="Name of the run and of its folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run of that name if it exists.")] = False,
    quiet: Quiet = False,
    no_panel: NoPanel = False,
    openreward: Uploads = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Simulate the run, without a model or a key, and estimate its cost and time."),
    ] = False,
    pilot: Annotated[
        int | None,
        typer.Option(min=1, help="With --dry-run: number of groups to play on the real service, to measure its speed."),
    ] = None,
) -> int:
    """Train a model. Ctrl-C finishes the step and saves; a second Ctrl-C stops immediately."""
    if dry_run:
        from rlkit.cli.rehearse import run as rehearse

        if resume:
            raise UsageError("--resume has no effect on a dry run: leave it out")
        if openreward:
            raise UsageError("--openreward has no effect on a dry run: leave it out")
        return rehearse(config, output, name=name, pilot=pilot or 0, quiet=quiet)
    if pilot is not None:
        raise UsageError("--pilot has no effect without --dry-run: add --dry-run")
    from rlkit.config.loading.load import load_arguments

    resolved = load_arguments([*config, *_tracking(openreward)], name=name)
    from rlkit.config.loading.run_config import is_run_directory, require_run_directory

    again = resume and is_run_directory(require_run_directory(resolved.config))
    return _train(output, resolved, resume=again, quiet=quiet, panel=not no_panel)


def resume(
    output: Output,
    run: RunName,
    values: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Setting to change, such as steps=200.")
    ] = None,
    *,
    quiet: Quiet = False,
    no_panel: NoPanel = False,
    openreward: Uploads = False,
) -> int:
    """Resume a run, or extend it.

    The run loads its last checkpoint, and replays later steps from its records.
    """
    from rlkit.config.loading.load import load_arguments
    from rlkit.config.loading.objects import BUILT_IN
    from rlkit.config.loading.run_config import find_run, find_run_config

    directory = find_run(run)
    arguments = [str(find_run_config(directory)), *(values or []), *_tracking(openreward)]
    resolved = load_arguments(arguments, name=directory.name)
    for name, spec in resolved.config.envs.items():
        if spec.env is None and name not in BUILT_IN:
            call = f"rlkit.train(…, name={directory.name!r}, resume=True)"
            raise UsageError(f"the tasks of {name} were passed in Python: resume the run there, with {call}")
    return _train(output, resolved, directory=directory, resume=True, quiet=quiet, panel=not no_panel)


def _tracking(openreward: bool) -> list[str]:
    return ["track.openreward={}"] if openreward else []


def _train(
    output: Output,
    resolved: ResolvedConfig,
    *,
    directory: Path | None = None,
    resume: bool,
    quiet: bool,
    panel: bool,
) -> int:
    from rlkit.training import StopSignal

    stop = StopSignal()
    tracker: PanelTracker | None = None
    trainer: RLTrainer | None = None

    def note(message: str) -> None:
        (output.note if tracker is None else tracker.on_note)(message)

    try:
        with graceful_shutdown(
            stop.request, note, message=FINISHING, is_ready=lambda: stop.is_watched
        ) as interruptible:
            # JSON on the same terminal would corrupt the panel.
            if panel and not quiet and is_redrawable(output.err) and not (output.json and output.out.isatty()):
                from rich.console import Console

                from rlkit.trackers.panel import PanelTracker

                tracker = PanelTracker(Console(file=output.err), clean=sanitise)
            if not quiet:
                (output.note if tracker is None else tracker.on_status)(
                    "resuming the run" if resume else "preparing the run"
                )
            trackers = _trackers(output, tracker, quiet=quiet)
            from rlkit.training.trainer import RLTrainer

            with resolved.locate_errors():
                trainer = RLTrainer(resolved, trackers=trackers, stop=stop, directory=directory, resume=resume)
            result = interruptible.run(trainer.train())
    except KeyboardInterrupt:
        if trainer is not None and trainer.directory is not None and trainer.directory.exists():
            note(_show_resumption(trainer.directory))
        raise
    finally:
        if tracker is not None:
            tracker.close()
    record = asdict(result)
    record = {"run": record.pop("name"), **record, "directory": str(result.directory)}
    output.result(record, output.wrap(_summary(result)))
    if result.status == "completed":
        return 0
    is_spent = result.status == "budget"
    setting = f" {result.reason.partition(':')[0]}=…" if is_spent else ""
    output.note(_show_resumption(result.directory) + setting)
    return BUDGET_REACHED if is_spent else INTERRUPTED


def _trackers(output: Output, panel: PanelTracker | None, *, quiet: bool) -> list[Tracker]:
    from rlkit.trackers.console import ConsoleTracker, JsonTracker

    trackers: list[Tracker] = [] if panel is None else [panel]
    silent = panel is not None or quiet
    if output.json:
        trackers.append(JsonTracker(output.data, note=output.silent if silent else output.note))
    elif not silent:
        trackers.append(ConsoleTracker(output.note))
    return trackers


def _summary(result: RunResult) -> str:
    from rlkit.trackers import console, rendering

    status = "out of budget" if result.status == "budget" else result.status
    lines = [f"{status}: {result.describe_gain()}", f"run           {result.directory}"]
    failures = {"in training": result.count_failures("env"), "in evaluations": result.count_failures("eval")}
    if any(failures.values()):
        counts = ", ".join(f"{count} {where}" for where, count in failures.items() if count)
        lines.append(f"failed        rollouts: {counts}")
    if len(last := console.collect_rewards(result.metrics)) > 2:  # the first line has all of one environment
        lines.append(
            "last rewards  " + "  ".join(f"{name} {rendering.render_number(value)}" for name, value in last.items())
        )
    lines += [f"best found    {name} {text}" for name, text in console.collect_best_values(result.metrics).items()]
    if result.checkpoint is not None:
        lines.append(f"checkpoint    {result.checkpoint.state}")
        lines.append(f"weights       {result.checkpoint.sampler}")
    if result.best_checkpoint is not None and result.best_checkpoint != result.checkpoint:
        lines.append(f"best weights  {result.best_checkpoint.sampler} (step {result.best_checkpoint.step})")
    if len(scores := result.rewards("eval")) > 1 and max(scores[1:]) < scores[0]:
        lines.append(f"note          no later evaluation was as good as the first one, {scores[0]:.2f}")
    if result.estimate is not None and result.status == "completed":  # the estimate covers all steps
        lines.append(f"dry run       expected {rendering.render_estimate(result.estimate)}")
    name = shlex.quote(_find_argument(result.directory))
    lines.append(f"look at it    rlkit view {name}")
    if result.checkpoint is not None:
        lines += [f"talk to it    rlkit chat {name}{_suggest_completion(result)}"]
        lines += [f"export it     rlkit export {name} --to DIR"]
    return "\n".join(lines)


def _suggest_completion(result: RunResult) -> str:
    """Return the options of `rlkit chat` that continue plain texts, and a text, for a run with such prompts."""
    from rlkit.config.loading.run_config import load_run_config
    from rlkit.tools.chat import find_text_prompt

    if (prompt := find_text_prompt(result.directory, result.steps)) is None:
        return ""
    max_tokens = load_run_config(result.directory).sampling.max_tokens
    return f" --complete --max-tokens {max_tokens}\n              its prompts are texts, such as {prompt[-60:]!r}"


def _show_resumption(directory: Path) -> str:
    return f"to resume: {shlex.join(['rlkit', 'resume', _find_argument(directory)])}"


def _find_argument(directory: Path) -> str:
    """Return the shortest argument with which commands find a run."""
    from rlkit._util.paths import runs_dir

    return directory.name if directory == runs_dir() / directory.name else str(directory)
