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
"""What a process that follows a run may take once the run is over; it is killed before that, unless the run was."""

_NICENESS = 19
"""Of a process that follows a run, which is to have the processor first."""


def sync(
    output: Output,
    run: RunName,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="A setting of the service, such as project=sums.", show_default=False),
    ] = None,
    *,
    to: Annotated[str, typer.Option(help="wandb, trackio, tensorboard or docent.")],
    again: Annotated[bool, typer.Option("--again", help="Send everything, to a new run of the service.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until standard input ends: how a run that is trained is sent.")
    ] = False,
) -> int:
    """Send a run to a service that shows runs.

    What it has already is not sent again. The settings are those of `track` in the run's configuration.
    """
    if again and follow:
        raise UsageError("--again and --follow are two ways to begin: give one")
    if follow:
        os.nice(_NICENESS)  # before anything is imported, which takes most of its time
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
        over = _end_of_input()
        count = send(directory, tracker, has_ended=over.is_set, sleep=over.wait)
    else:
        count = send(directory, tracker, again=again)
    said = f"{count} steps of {directory.name} sent to {to}" if count else f"{to} has all of {directory.name}"
    output.result({"run": directory.name, "to": to, "steps": count}, said)
    return 0


def _end_of_input() -> threading.Event:
    """Set when whoever started this process has said so on its input, has closed it, or was killed."""
    over = threading.Event()

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)  # not through a buffer, whose lock would be held when the process ends
        over.set()
        time.sleep(_AFTER_END_S)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    return over
