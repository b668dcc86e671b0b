"""Services that show a run, each fed by `rlkit sync` from a process of its own.

Invariant: a service is only ever given what is in the run's folder, so that what it missed can be sent again. The run
waits for the process at its end only, for some seconds; the process takes neither the run's interpreter nor its
console, and ends with the run, also when that is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar

from rlkit._util.sections import Section
from rlkit.errors import RlkitError
from rlkit.trackers import RunInfo, RunResult, Tracker
from rlkit.trackers.recorded_run import RecordedRun, RecordedStep, clean

if TYPE_CHECKING:
    from rlkit.types import Json

LAST_S = 30.0
"""Seconds that the end of a run waits for a service that is behind."""

_LAST_FAILED_S = 5.0
"""The same for a run that failed or was stopped at once."""

_LAST_BYTES = 20_000
"""End of what the process wrote to its standard error, where its last line is."""

_END = b"."
"""Message to the process that the run is over."""


class NotSent(RlkitError):
    """A service misses a part of the run, which is in the run's folder."""


class ServiceTracker[S: Section](Tracker):
    """A service that shows runs.

    A subclass is one module: its name, its section of `track`, and `open`, `show` and `close`, which `rlkit sync`
    calls. It imports the service's package in these methods only. Whatever they raise is tried again, and then ends
    the sending, never the run.

    Args:
        settings: the checked section.
        last_s: seconds that the end of the run waits for what is not sent yet.
    """

    name: ClassVar[str]
    settings_type: ClassVar[type[Section]]
    _stderr: IO[bytes]

    def __init__(self, settings: S, *, last_s: float = LAST_S) -> None:
        self.settings = settings
        self._last_s = last_s
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = Path()

    def require(self) -> None:
        """Raise MissingError if the package or the credential of the service is missing, before a run begins."""

    def open(self, run: RecordedRun, state: Mapping[str, Json]) -> Mapping[str, Json]:
        """Begin to show a run, or go on with it.

        `state` is the result of an earlier `open` for this run, with whatever is needed to go on; empty for the first.
        """
        return {}

    def show(self, step: RecordedStep) -> None:
        """Show a step. It may be shown twice, if the process dies in between."""

    def close(self, status: str) -> None:
        """End the sending for now, with the status of the run."""

    def on_start(self, run: RunInfo) -> None:
        """Start the process."""
        self._directory = run.directory
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed at the end of the run
        command = [sys.executable, "-m", "rlkit", "sync", str(run.directory), "--to", self.name, "--follow"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # its end is the end of the run
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the run, which says when to end
        )

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise NotSent if the process has given up; it reads the step from the run's folder."""
        if self._process is not None and self._process.poll() is not None:
            raise self._failure()

    def on_finish(self, result: RunResult | None) -> None:
        """Wait for what is left, for a limited time; NotSent if not everything was sent."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None  # as asked for
        with process.stdin, suppress(OSError):  # it is gone already
            process.stdin.write(_END)  # a process that an environment forked may hold the pipe open
        limit_s = self._last_s if result is not None else min(self._last_s, _LAST_FAILED_S)
        with self._stderr:
            try:
                returncode = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise self._failure(f"it had not taken everything {limit_s:g} s after the run's end") from None
            if returncode != 0:
                raise self._failure()

    def _failure(self, reason: str = "") -> NotSent:
        if not reason:
            self._stderr.seek(max(self._stderr.seek(0, os.SEEK_END) - _LAST_BYTES, 0))
            lines = clean(self._stderr.read().decode(errors="replace")).strip().splitlines()
            reason = lines[-1].strip().removeprefix("error: ") if lines else "its process ended"
        return NotSent(f"{reason}; `rlkit sync {self._directory.name} --to {self.name}` sends the rest")
