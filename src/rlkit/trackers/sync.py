"""Send the recorded steps of a run's folder to an experiment-tracking service.

Invariant: a step is recorded as sent only after the service has accepted it. Two processes never send the same run to
the same service at the same time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rlkit._util import files
from rlkit.config.loading.secrets import clean
from rlkit.errors import RlkitError, UsageError
from rlkit.trackers.recorded_run import StepReader, read_run
from rlkit.trackers.service import ServiceTracker
from rlkit.types import Json

_POLL_S = 0.5
_FIRST_PAUSE_S = 1.0
_MAX_FAILURES = 4  # consecutive failures after which sending stops; the pause between attempts doubles


class SendingFailed(RlkitError):
    """A service did not accept a step. The run's folder is complete, so sending can be repeated."""


@dataclass(frozen=True, slots=True)
class SendProgress:
    """Progress of sending a run to a service: the last step sent, and the state that the tracker's `open` returned."""

    step: int = -1
    state: Mapping[str, Json] = field(default_factory=dict["str", "Json"])


def _progress_path(directory: Path, name: str) -> Path:
    return directory / "trackers" / f"{name}.json"


def read_progress(directory: Path, name: str) -> SendProgress:
    """Return the progress of sending a run to a service; no progress if the file is missing or damaged."""
    try:
        record = json.loads(_progress_path(directory, name).read_text())
        return SendProgress(int(record["step"]), dict(record["state"]))
    except (OSError, ValueError, KeyError, TypeError):
        return SendProgress()


def send(
    directory: Path,
    tracker: ServiceTracker[Any],
    *,
    is_new_run: bool = False,
    has_ended: Callable[[], bool] = lambda: True,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Send the steps that the service does not have yet, and return their number.

    Args:
        is_new_run: send all steps, to a new run of the service.
        has_ended: returns whether the run has ended; until then, `send` waits for further steps.

    Raises:
        UsageError: another process is sending the run, or its files are damaged.
        SendingFailed: the service failed several times in a row.
    """
    name, path = tracker.name, _progress_path(directory, tracker.name)
    files.make_folder(path.parent)
    try:
        lock = FileLock(path.with_suffix(".lock")).acquire(timeout=0)
    except Timeout:
        raise UsageError(f"{directory.name} is being sent to {name} by another process: wait for it") from None
    with lock:
        before = SendProgress() if is_new_run else read_progress(directory, name)
        attempt = partial(_attempt, directory, name, sleep)
        state = attempt("opening a run failed", lambda: tracker.open(read_run(directory), before.state))
        _write_progress(path, before.step, state)
        reader, count, is_over = StepReader(directory, after=before.step), 0, False
        while not is_over:
            is_over = has_ended()  # checked before reading, so that no step is written in between
            for step in reader.steps(has_ended=is_over):
                attempt(f"sending step {step.number} failed", partial(tracker.show, step))
                _write_progress(path, step.number, state)
                count += 1
            if not is_over:
                sleep(_POLL_S)
        attempt("closing the run failed", lambda: tracker.close(read_run(directory).status))
        return count


def _attempt[T](directory: Path, name: str, sleep: Callable[[float], object], failure: str, call: Callable[[], T]) -> T:
    failures = 0
    while True:
        try:
            return call()
        except RlkitError:  # an error of the run's own files, not of the service
            raise
        except Exception as error:  # a service's package may raise anything
            failures += 1
            if failures == _MAX_FAILURES:
                text = clean(" ".join(f"{type(error).__name__}: {error}".split()))
                command = f"`rlkit sync {directory.name} --to {name}`"
                raise SendingFailed(f"{name}: {failure}: {text}; to retry: {command}") from error
            sleep(_FIRST_PAUSE_S * 2 ** (failures - 1))


def _write_progress(path: Path, step: int, state: Mapping[str, Json]) -> None:
    files.write_text(path, json.dumps({"step": step, "state": dict(state)}) + "\n")
