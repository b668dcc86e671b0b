"""Trackers of experiment-tracking services, which run `rlkit sync` in a separate process.

Invariant: a service receives only data from the run's folder, so missing steps can be sent later. The run waits for the
process only at its end, for a limited time. The process ends with the run, even if the run is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, ClassVar

from rlkit._util.sections import Section
from rlkit.config.loading.secrets import clean
from rlkit.errors import RlkitError
from rlkit.trackers import RunInfo, RunResult, Tracker
from rlkit.trackers.recorded_run import RecordedRun, RecordedStep
from rlkit.types import Json

LAST_S = 30.0  # seconds that the end of a run waits for unsent steps
_LAST_FAILED_S = 5.0  # seconds that the end of a run waits if it failed or was stopped immediately
_RESTART_S = 300.0  # shortest time between two starts of the process, which ends after repeated failures of the service
_LAST_BYTES = 20_000  # bytes read from the end of the process's stderr, to find its last line
_END = b"."  # message to the process that the run is over


class NotSent(RlkitError):
    """A service did not receive all steps of the run; the run's folder is complete."""


class ServiceTracker[S: Section](Tracker):
    """Base class of trackers that send a run to a service.

    A subclass defines its name, its section of `track`, and `open`, `show` and `close`, which `rlkit sync` calls.
    Import the service's package only in these methods. If a method raises, it is retried; after repeated failures the
    sending pauses for minutes. The run goes on.

    Args:
        settings: the validated section.
        last_s: seconds that the end of the run waits for unsent steps.
    """

    name: ClassVar[str]
    settings_type: ClassVar[type[Section]]
    _stderr: IO[bytes]
    _started_s: float

    def __init__(self, settings: S, *, last_s: float = LAST_S) -> None:
        self.settings = settings
        self._last_s = last_s
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = Path()

    def require(self) -> None:
        """Raise MissingError if the package or the credential of the service is missing; called before a run starts."""

    def open(self, run: RecordedRun, state: Mapping[str, Json]) -> Mapping[str, Json]:
        """Open the service's run, or continue it.

        Args:
            state: result of the previous `open` for this run; empty at the first.

        Returns:
            State that a later `open` needs to continue, such as the run's id at the service.
        """
        return {}

    def show(self, step: RecordedStep) -> None:
        """Send a step. A step may be sent twice if the process is killed."""

    def close(self, status: str) -> None:
        """Finish sending; `status` is the status of the run."""

    def on_start(self, run: RunInfo) -> None:
        """Start the process."""
        self._directory = run.directory
        self._start()

    def _start(self) -> None:
        self._started_s = time.monotonic()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed at the end of the run
        command = [sys.executable, "-m", "rlkit", "sync", str(self._directory), "--to", self.name, "--follow"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # closed at the end of the run
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches only the run
        )

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise NotSent if the process has ended, and start it again. It reads the step from the run's folder."""
        process = self._process
        if process is not None and process.poll() is not None:
            error = self._make_error()
            if time.monotonic() - self._started_s >= _RESTART_S:
                with process, self._stderr:  # closes both
                    self._start()
            raise error

    def on_finish(self, result: RunResult | None) -> None:
        """Wait for unsent steps, for a limited time; raise NotSent if steps remain."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with process.stdin, suppress(OSError):  # the process has already ended
            process.stdin.write(_END)  # closing is not enough: a process forked by an environment may hold the pipe
        limit_s = self._last_s if result is not None else min(self._last_s, _LAST_FAILED_S)
        with self._stderr:
            try:
                returncode = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise self._make_error(f"sending was not finished {limit_s:g} s after the run's end") from None
            if returncode != 0:
                raise self._make_error()

    def _make_error(self, reason: str = "") -> NotSent:
        if not reason:
            self._stderr.seek(max(self._stderr.seek(0, os.SEEK_END) - _LAST_BYTES, 0))
            lines = clean(self._stderr.read().decode(errors="replace")).strip().splitlines()
            reason = lines[-1].strip().removeprefix("error: ") if lines else "its process ended"
        return NotSent(f"{reason}; `rlkit sync {self._directory.name} --to {self.name}` sends the rest")
