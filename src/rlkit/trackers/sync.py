"""Sending what a run's folder holds to a service that shows it.

Invariant: a step is written down as sent once the service has it, and not before; a second process does not send the
same run to the same service at the same time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from rlkit._util import files
from rlkit.errors import RlkitError, UsageError
from rlkit.trackers.feed import Feed, clean, told
from rlkit.trackers.sinks import Sink

if TYPE_CHECKING:
    from rlkit.types import Json

_POLL_S = 0.5
_MOST_FAILURES = 4
"""In a row, after which a service is given up; the pauses between them grow to some seconds."""

_PAUSE_S = 0.5


class SendingFailed(RlkitError):
    """A service did not take a step. Everything is in the run's folder and can be sent again."""


@dataclass(frozen=True, slots=True)
class Sent:
    """How far a run was sent to a service.

    Args:
        step: the last one; −1 for none.
        state: what the service needs to go on with the same run.
    """

    step: int = -1
    state: Mapping[str, Json] = field(default_factory=dict["str", "Json"])


def progress_path(directory: Path, name: str) -> Path:
    """The file of a run's folder that says how far it was sent to a service."""
    return directory / "trackers" / f"{name}.json"


def sent(directory: Path, name: str) -> Sent:
    """How far a run was sent to a service; nothing where the file is missing or damaged."""
    try:
        found = json.loads(progress_path(directory, name).read_text())
        return Sent(int(found["step"]), dict(found["state"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Sent()


def send(
    directory: Path,
    name: str,
    sink: Sink,
    *,
    again: bool = False,
    ended: Callable[[], bool] = lambda: True,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Send what the service does not have yet.

    Args:
        directory: of the run.
        name: of the service.
        sink: the service.
        again: send everything, to a new run of the service.
        ended: whether nothing more will be written; until then it is waited for.
        sleep: waits for some seconds.

    Returns:
        How many steps were sent.

    Raises:
        UsageError: another process sends the run, or its files are damaged.
        SendingFailed: the service fails again and again.
    """
    path = progress_path(directory, name)
    files.make_folder(path.parent)
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(f"{directory.name} is being sent to {name} by another process: wait for it") from None
    try:
        before = Sent() if again else sent(directory, name)
        return _Sending(directory, name, sink, sleep).run(before, ended)
    finally:
        lock.release()


class _Sending:
    def __init__(self, directory: Path, name: str, sink: Sink, sleep: Callable[[float], object]) -> None:
        self._directory = directory
        self._name = name
        self._sink = sink
        self._sleep = sleep

    def run(self, before: Sent, ended: Callable[[], bool]) -> int:
        state = self._tried(lambda: self._sink.open(told(self._directory), before.state), "a run could not be begun")
        self._keep(Sent(before.step, state))
        feed, count = Feed(self._directory, after=before.step), 0
        while True:
            over = ended()  # asked before what is there is read, so that nothing is written in between
            for step in feed.steps(ended=over):
                self._tried(lambda step=step: self._sink.step(step), f"step {step.number} could not be shown")
                self._keep(Sent(step.number, state))
                count += 1
            if over:
                break
            self._sleep(_POLL_S)
        self._tried(lambda: self._sink.close(told(self._directory).status), "the end could not be shown")
        return count

    def _tried[T](self, ask: Callable[[], T], failed: str) -> T:
        failures = 0
        while True:
            try:
                return ask()
            except RlkitError:  # of the run's own files: the service is not to blame
                raise
            except Exception as error:  # services raise anything
                failures += 1
                if failures == _MOST_FAILURES:
                    said = clean(" ".join(f"{type(error).__name__}: {error}".split()))
                    raise SendingFailed(
                        f"{self._name}: {failed}: {said}; `rlkit sync {self._directory.name} --to {self._name}` "
                        "tries again"
                    ) from error
                self._sleep(_PAUSE_S * 2**failures)

    def _keep(self, sent: Sent) -> None:
        content = {"step": sent.step, "state": dict(sent.state)}
        files.write_text(progress_path(self._directory, self._name), json.dumps(content) + "\n")
