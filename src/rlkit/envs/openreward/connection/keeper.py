"""Run a command while its own input is open: a server that ends with the process that started it.

Started as a file, with the command as its arguments. It knows nothing of rlkit, so that it starts at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 5.0
"""Time for the command to end before it is killed."""


def main() -> int:
    """Run the command and return its exit code."""
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def wait_for_the_end() -> None:
        os.read(0, 1)  # comes back when whoever holds the other end closes it, or has ended
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        _signal(process.pid, signal.SIGKILL)  # what it started may go on after it

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
