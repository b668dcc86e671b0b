"""Programs with a time limit.

Invariant: a program that exceeds its limit is killed with its process group, so no process prints a traceback later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from rlkit._util.redaction import redact
from rlkit._util.threads import call_within


class ProgramResult(NamedTuple):
    """Exit code of a program (None if it reached its limit), and its last line of output, without secrets."""

    code: int | None
    last_line: str


def run_program(
    command: Sequence[str], *, timeout_s: float, progress: Callable[[str, float], None] = lambda line, seconds: None
) -> ProgramResult:
    """Run a program until it ends or reaches its limit.

    Args:
        progress: receives the last line of the output and the elapsed seconds, as of `call_within`.

    Raises:
        OSError: the program cannot be started.
    """
    with tempfile.TemporaryFile() as output:  # a pipe would stay open in processes that the program leaves behind
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )

        def read_last_line() -> str:
            text = redact(os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace"))
            return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")

        try:
            code = call_within(
                process.wait, timeout_s=timeout_s, progress=lambda seconds: progress(read_last_line(), seconds)
            )
            return ProgramResult(code if isinstance(code, int) else None, read_last_line())
        finally:
            with suppress(ProcessLookupError):  # the process group is empty
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
