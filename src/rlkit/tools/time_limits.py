"""Questions to programs and services that may never answer.

Invariant: each question has a limit. A program that passes it is ended with all that it started, so that nothing of it
is left to print a traceback later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rlkit._util.redaction import redact

PROGRESS_S = 10.0
"""How often the user is told that a question is still open."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The exit status of a program, None if it was ended at its limit, and its output without secrets."""

    code: int | None
    output: str

    @property
    def last_line(self) -> str:
        """The last line that is not empty."""
        return next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "")


def run_program(
    command: Sequence[str], *, timeout_s: float, progress: Callable[[str, float], None] = lambda line, seconds: None
) -> Answer:
    """Run a program to its end, or to its limit.

    Args:
        command: words of the command.
        timeout_s: limit in seconds.
        progress: receives the last line that it printed and how long it has run, every `PROGRESS_S`.

    Raises:
        OSError: it cannot be started.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryFile() as output:  # a pipe would be held open by whatever it leaves behind
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )

        def answer(code: int | None) -> Answer:
            return Answer(code, redact(os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")))

        try:
            while (left_s := started_s + timeout_s - time.monotonic()) > 0:
                try:
                    return answer(process.wait(min(left_s, PROGRESS_S)))
                except subprocess.TimeoutExpired:
                    progress(answer(None).last_line, time.monotonic() - started_s)
            return answer(None)
        finally:
            with suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def call_within[T](
    look: Callable[[], T], *, timeout_s: float, progress: Callable[[float], None] = lambda seconds: None
) -> T | str:
    """Return what a function returns, or in one line what it raised or that it took too long.

    Args:
        look: called in a daemon thread, and abandoned where it never ends: looking up a host name or a folder of a
            network has no limit of its own.
        timeout_s: limit in seconds.
        progress: receives how long it has run, every `PROGRESS_S`.
    """
    answers = list[T | str]()

    def ask() -> None:
        try:
            answers.append(look())
        except Exception as error:  # whatever is broken is reported, however it is broken
            text = (str(error).strip().splitlines() or [""])[0]
            answers.append(f"{type(error).__name__}: {text}".rstrip(": "))

    started_s = time.monotonic()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    while thread.is_alive() and (left_s := started_s + timeout_s - time.monotonic()) > 0:
        thread.join(min(left_s, PROGRESS_S))
        if thread.is_alive():
            progress(time.monotonic() - started_s)
    return answers[0] if answers else f"no answer within {timeout_s:g} s"
