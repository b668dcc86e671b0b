"""Programs with a time limit.

Invariant: a program that exceeds its limit is killed with its process group, so no process prints a traceback later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rlkit._util.redaction import redact

PROGRESS_S = 10.0
"""Seconds between reports of progress."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Exit code of a program (None if it reached its limit), and its output without secrets."""

    code: int | None
    output: str

    @property
    def last_line(self) -> str:
        """The last line that is not empty."""
        return next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "")


def run_program(
    command: Sequence[str], *, timeout_s: float, progress: Callable[[str, float], None] = lambda line, seconds: None
) -> ProgramResult:
    """Run a program until it ends or reaches its limit.

    Args:
        progress: receives the last line of the output and the elapsed seconds, every `PROGRESS_S`.

    Raises:
        OSError: the program cannot be started.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryFile() as output:  # a pipe would stay open in processes that the program leaves behind
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )

        def make_result(code: int | None) -> ProgramResult:
            return ProgramResult(code, redact(os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")))

        try:
            while (left_s := started_s + timeout_s - time.monotonic()) > 0:
                try:
                    return make_result(process.wait(min(left_s, PROGRESS_S)))
                except subprocess.TimeoutExpired:
                    progress(make_result(None).last_line, time.monotonic() - started_s)
            return make_result(None)
        finally:
            with suppress(ProcessLookupError):  # the process group is empty
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
