"""`rlkit sync`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Annotated, cast

import typer

from rlkit.cli.common.options import RunName
from rlkit.cli.common.output import Output
from rlkit.errors import UsageError

_AFTER_END_S = 60.0
"""Limit in seconds of a process that follows a run, after the run has ended. The run kills it earlier, if it can."""

_NICENESS = 19
"""Niceness of a process that follows a run, so that the run has the processor first."""


def sync(
    output: Output,
    run: RunName,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Setting of the tracker, such as project=sums.", show_default=False),
    ] = None,
    *,
    to: Annotated[str, typer.Option(help="Tracker: wandb, trackio, tensorboard or docent.")],
    again: Annotated[bool, typer.Option("--again", help="Send all steps, to a new run of the tracker.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Continue until standard input ends, as for a running run.")
    ] = False,
) -> int:
    """Send a run to a tracker.

    Steps that the tracker has already are skipped. The settings are those of `track` in the run's configuration.
    """
    if again and follow:
        raise UsageError("--again and --follow exclude each other: give one")
    if follow:
        os.nice(_NICENESS)  # before the imports, which take most of the time
    import yaml

    from rlkit.store.metadata import find_run
    from rlkit.trackers.from_config import load_service
    from rlkit.trackers.recorded_run import read_run
    from rlkit.trackers.sync import send

    directory = find_run(run)
    sections = cast("Mapping[str, Mapping[str, object] | None]", read_run(directory).config.get("track") or {})
    settings = dict(sections.get(to) or {})
    for value in values or []:
        key, equals, text = value.partition("=")
        if not equals:
            raise UsageError(f"{value!r} is no setting of {to}: write it as key=value")
        settings[key] = yaml.safe_load(text)
    tracker = load_service(to, settings)
    if follow:
        end = _watch_input_end()
        count = send(directory, tracker, has_ended=end.is_set, sleep=end.wait)
    else:
        count = send(directory, tracker, again=again)
    summary = f"{count} steps of {directory.name} sent to {to}" if count else f"{to} has all of {directory.name}"
    output.result({"run": directory.name, "to": to, "steps": count}, summary)
    return 0


def _watch_input_end() -> threading.Event:
    """Return an event that is set when the parent process writes to stdin, closes it, or is killed."""
    end = threading.Event()

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)  # not through a buffer, whose lock would be held when the process ends
        end.set()
        time.sleep(_AFTER_END_S)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    return end
