"""A process beside the run that sends it to a service, as `rlkit sync` does.

Invariant: the run never waits for that process but at its end, and there for some seconds at most; it takes neither the
run's interpreter nor its console, and it ends with the run, also when that is killed.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.errors import RlkitError
from rlkit.trackers import RunInfo, RunResult, Tracker
from rlkit.trackers.feed import clean
from rlkit.types import Checkpoint

if TYPE_CHECKING:
    from rlkit.config.schema.track import TrackConfig

LAST_S = 30.0
"""What the end of a run waits for services that are behind."""

_LAST_FAILED_S = 5.0
"""The same, of a run that failed or was stopped at once."""

_LAST_LINES_S = 1.0

_END = b"."
"""Tells the process that the run is over."""

_KEPT_LINES = 20


class NotSent(RlkitError):
    """A service misses a part of the run, which is in the run's folder."""


class Following(Tracker):
    """Sends the run to a service from a process of its own.

    Args:
        name: of the service, one of `rlkit.trackers.sinks.NAMES`.
        last_s: seconds that the end of the run waits for what is not sent yet.
    """

    def __init__(self, name: str, *, last_s: float = LAST_S) -> None:
        self._name = name
        self._last_s = last_s
        self._process: subprocess.Popen[bytes] | None = None
        self._listening: threading.Thread | None = None
        self._said = deque[str](maxlen=_KEPT_LINES)
        self._directory = Path()
        self._told = False

    def started(self, run: RunInfo) -> None:  # noqa: D102  inherited
        self._directory = run.directory
        command = [sys.executable, "-m", "rlkit", "sync", str(run.directory), "--to", self._name, "--follow"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # its end is the end of the run
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the run, which says when to end
        )
        self._listening = threading.Thread(
            target=self._listen, args=(self._process,), name=f"rlkit-{self._name}", daemon=True
        )
        self._listening.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The process reads it from the run's folder.

        Raises:
            NotSent: the process has given up; told once.
        """
        if self._process is not None and self._process.poll() is not None:
            self._tell()

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Nothing to send."""

    def note(self, message: str) -> None:
        """Nothing to send."""

    def finished(self, result: RunResult | None) -> None:
        """Wait for what is left, for a while.

        Raises:
            NotSent: not everything was sent.
        """
        process = self._process
        if process is None:
            return
        assert process.stdin is not None  # as asked for
        with process.stdin, suppress(OSError):  # it is gone already
            process.stdin.write(_END)  # a process that an environment forked may hold the pipe open
        limit_s = self._last_s if result is not None else min(self._last_s, _LAST_FAILED_S)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._said.append(f"it had not taken everything {limit_s:g} s after the run's end")
        if self._listening is not None:
            self._listening.join(_LAST_LINES_S)
        if process.returncode != 0:
            self._tell()

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            said = self._said[-1] if self._said else "its process ended"
            raise NotSent(
                f"{said.removeprefix('error: ')}; `rlkit sync {self._directory.name} --to {self._name}` sends the rest"
            )

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None  # as asked for
        with process.stderr:
            for line in process.stderr:  # to its end, or the process would wait for somebody to read it
                if text := clean(line.decode(errors="replace")).strip():
                    self._said.append(text)


def following(track: TrackConfig) -> list[Tracker]:
    """The trackers that a configuration names.

    Raises:
        MissingError: a package or a credential is missing.
    """
    from rlkit.trackers.sinks import chosen, require

    named = chosen(track)
    for name, settings in named.items():
        require(name, settings)
    return [Following(name) for name in named]
