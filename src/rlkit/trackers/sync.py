"""Sending what a run's folder holds to a service that shows it.

Invariant: a step is written down as sent once the service has it, and not before; a second process does not send the
same run to the same service at the same time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from rlkit._util import files
from rlkit.errors import RlkitError, UsageError
from rlkit.trackers.recorded_run import StepReader, clean, read_run
from rlkit.trackers.service import ServiceTracker

if TYPE_CHECKING:
    from rlkit.types import Json

_POLL_S = 0.5
_FIRST_PAUSE_S = 1.0
_MAX_FAILURES = 4
"""Failures in a row after which a service is given up; the pause between them doubles."""


class SendingFailed(RlkitError):
    """A service did not take a step. Everything is in the run's folder and can be sent again."""


@dataclass(frozen=True, slots=True)
class SendProgress:
    """Progress of sending a run to a service: the last step that was sent, and the result of the service's `open`."""

    step: int = -1
    state: Mapping[str, Json] = field(default_factory=dict["str", "Json"])


def _progress_path(directory: Path, name: str) -> Path:
    return directory / "trackers" / f"{name}.json"


def read_progress(directory: Path, name: str) -> SendProgress:
    """Return how far a run was sent to a service; nothing where the file is missing or damaged."""
    try:
        record = json.loads(_progress_path(directory, name).read_text())
        return SendProgress(int(record["step"]), dict(record["state"]))
    except (OSError, ValueError, KeyError, TypeError):
        return SendProgress()


def send(
    directory: Path,
    tracker: ServiceTracker[Any],
    *,
    again: bool = False,
    has_ended: Callable[[], bool] = lambda: True,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Send what a service does not have yet; return the number of steps that were sent.

    Args:
        again: send everything, to a new run of the service.
        has_ended: returns whether nothing more will be written; until then `send` waits for more.

    Raises:
        UsageError: another process sends the run, or its files are damaged.
        SendingFailed: the service fails again and again.
    """
    name, path = tracker.name, _progress_path(directory, tracker.name)
    files.make_folder(path.parent)
    try:
        lock = FileLock(path.with_suffix(".lock")).acquire(timeout=0)
    except Timeout:
        raise UsageError(f"{directory.name} is being sent to {name} by another process: wait for it") from None
    with lock:
        before = SendProgress() if again else read_progress(directory, name)
        attempt = partial(_attempt, directory, name, sleep)
        state = attempt("a run could not be begun", lambda: tracker.open(read_run(directory), before.state))
        _write_progress(path, before.step, state)
        feed, count, over = StepReader(directory, after=before.step), 0, False
        while not over:
            over = has_ended()  # asked before what is there is read, so that nothing is written in between
            for step in feed.steps(has_ended=over):
                attempt(f"step {step.number} could not be shown", partial(tracker.show, step))
                _write_progress(path, step.number, state)
                count += 1
            if not over:
                sleep(_POLL_S)
        attempt("the end could not be shown", lambda: tracker.close(read_run(directory).status))
        return count


def _attempt[T](directory: Path, name: str, sleep: Callable[[float], object], failure: str, call: Callable[[], T]) -> T:
    failures = 0
    while True:
        try:
            return call()
        except RlkitError:  # of the run's own files: the service is not to blame
            raise
        except Exception as error:  # services raise anything
            failures += 1
            if failures == _MAX_FAILURES:
                text = clean(" ".join(f"{type(error).__name__}: {error}".split()))
                command = f"`rlkit sync {directory.name} --to {name}`"
                raise SendingFailed(f"{name}: {failure}: {text}; {command} tries again") from error
            sleep(_FIRST_PAUSE_S * 2 ** (failures - 1))


def _write_progress(path: Path, step: int, state: Mapping[str, Json]) -> None:
    files.write_text(path, json.dumps({"step": step, "state": dict(state)}) + "\n")
