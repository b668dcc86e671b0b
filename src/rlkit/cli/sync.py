"""`rlkit sync`."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Annotated

import typer

from rlkit.cli.common.options import RunName
from rlkit.cli.common.output import Output
from rlkit.errors import UsageError

_AFTER_END_S = 60.0
"""Seconds after the end of a run until its `--follow` process exits. Usually the run kills the process earlier."""

_NICENESS = 19  # niceness of a `--follow` process, so that the run has priority


def sync(
    output: Output,
    run: RunName,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Setting of the tracker, such as project=sums.", show_default=False),
    ] = None,
    *,
    to: Annotated[str, typer.Option(help="Tracker: wandb, trackio, tensorboard, docent or openreward.")],
    new_run: Annotated[bool, typer.Option("--new-run", help="Send all steps, to a new run of the tracker.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Send new steps during the run, until standard input is closed.")
    ] = False,
) -> None:
    """Send a run to a tracker.

    Steps that were already sent are skipped. Settings default to the section `track` of the run's configuration.
    """
    if new_run and follow:
        raise UsageError("--new-run and --follow exclude each other: leave out one of them")
    if follow:
        os.nice(_NICENESS)  # before the imports, which take most of the time
    import yaml

    from rlkit._util.files.json_fields import pick_object
    from rlkit.config.loading.run_config import find_run
    from rlkit.trackers.from_config import load_service
    from rlkit.trackers.recorded_run import read_run
    from rlkit.trackers.sync import send

    directory = find_run(run)
    settings = pick_object(read_run(directory).config, f"track.{to}")
    for value in values or []:
        key, equals, text = value.partition("=")
        if not equals:
            raise UsageError(f"{value!r} is not a setting of {to}: write key=value")
        settings[key] = yaml.safe_load(text)
    tracker = load_service(to, settings)
    if follow:
        end = _watch_input_end()
        count = send(directory, tracker, has_ended=end.is_set, sleep=end.wait)
    else:
        count = send(directory, tracker, is_new_run=new_run)
    summary = f"sent {count} steps of {directory.name} to {to}" if count else f"{to} has all steps of {directory.name}"
    output.result({"run": directory.name, "to": to, "steps": count}, summary)


def _watch_input_end() -> threading.Event:
    """Return an event that is set when the parent process writes to stdin, closes it, or is killed."""
    end = threading.Event()

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)  # unbuffered: the lock of a buffer would be held when the process ends
        end.set()
        time.sleep(_AFTER_END_S)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    return end
