"""Run a command as long as stdin is open, so that it and its descendants end with the process that started it.

A byte on stdin kills the command at once.
Run as a script with the command as arguments. It does not import rlkit, so it starts immediately.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL."""

_ORPHANS_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Run the command and return its exit code."""
    with contextlib.suppress(AttributeError):  # not Linux: descendants in other process groups may survive
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        close_fds=False,  # the caller chose those that the command inherits
    )
    has_ended = threading.Event()

    def wait_for_the_end() -> None:
        if not os.read(0, 1):  # the owner has closed the other end, or has ended
            _signal(process.pid, signal.SIGTERM)
            has_ended.wait(GRACE_S)
        _signal(process.pid, signal.SIGKILL)  # processes that it started may still run

    watching = threading.Thread(target=wait_for_the_end, daemon=True)
    watching.start()
    child = status = 0
    while child != process.pid:  # orphans of the command are children of this process
        child, status = os.wait()
    has_ended.set()
    code = os.waitstatus_to_exitcode(status)
    _signal(process.pid, signal.SIGKILL)
    _kill_orphans()
    return code if code >= 0 else 128 - code


def _kill_orphans() -> None:
    end_s = time.monotonic() + _ORPHANS_S
    while time.monotonic() < end_s:
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                if path.read_text(errors="replace").rpartition(")")[2].split()[1] == str(os.getpid()):
                    os.kill(int(path.parent.name), signal.SIGKILL)
        try:
            if not any(os.waitpid(-1, os.WNOHANG)):
                time.sleep(0.01)
        except ChildProcessError:
            return


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
