"""Run a command as long as stdin is open, so that it and its children end with the process that started it.

A byte on stdin kills the command at once.
Run as a script with the command as arguments. It does not import rlkit, so it starts immediately.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL."""


def main() -> int:
    """Run the command and return its exit code."""
    process = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        close_fds=False,  # the caller chose those that the command inherits
    )

    def wait_for_the_end() -> None:
        if not os.read(0, 1):  # the owner has closed the other end, or has ended
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        _signal(process.pid, signal.SIGKILL)  # processes that it started may still run

    watching = threading.Thread(target=wait_for_the_end, daemon=True)
    watching.start()
    code = process.wait()
    _signal(process.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
