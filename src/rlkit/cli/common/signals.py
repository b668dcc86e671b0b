"""Handling of Ctrl-C and SIGTERM: the first signal finishes the step and saves, the second stops immediately.

Invariant: after the second signal the process ends, even if its clean-up hangs.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Never

from rlkit.cli.common.guard import INTERRUPTED

if TYPE_CHECKING:
    from rlkit._util.threads import Interruptible

CLEAN_UP_S = 10.0
"""Time limit in seconds of the clean-up (containers, engine) after the second signal."""


def run_terminable[T](main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that Ctrl-C and SIGTERM cancel, so that its containers and sandboxes are removed."""
    from rlkit._util.threads import Interruptible  # imported late to keep `--help` fast

    interruptible = Interruptible()
    previous = signal.signal(signal.SIGTERM, lambda number, frame: interruptible.interrupt())
    try:
        return interruptible.run(main)
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def graceful_shutdown(
    request_stop: Callable[[], None],
    note: Callable[[str], None],
    *,
    message: str,
    is_ready: Callable[[], bool] = lambda: True,
    clean_up_s: float = CLEAN_UP_S,
) -> Generator[Interruptible]:
    """Call `request_stop` at the first SIGINT or SIGTERM, and raise KeyboardInterrupt at the second.

    The second signal also cancels the coroutine that the yielded object runs. A clean-up longer than `clean_up_s`, or a
    third signal, ends the process with code 130.

    Args:
        request_stop: called in the signal handler.
        note: receives `message` at the first signal, on another thread.
        is_ready: returns whether the run can stop gracefully; before that, the first signal raises KeyboardInterrupt.
    """
    from rlkit._util.threads import Interruptible  # imported late to keep `--help` fast

    received, interruptible = 0, Interruptible()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received == 1 and not is_ready():
            received = 2
        if received == 1:
            request_stop()
            # On another thread, because this one may be writing to the same stream.
            threading.Thread(target=note, args=(message,), daemon=True).start()
        elif received == 2:
            timer = threading.Timer(clean_up_s, _end, [f"stopped: cleaning up took longer than {clean_up_s:.0f} s"])
            timer.daemon = True
            timer.start()
            interruptible.interrupt()
        else:
            _end("stopped without cleaning up")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruptible
    finally:
        if received < 2:  # after the second signal, Ctrl-C during the clean-up must still end the process
            for number, handler in previous.items():
                signal.signal(number, handler)


def _end(message: str) -> Never:
    """End the process regardless of locks, and show the terminal's cursor, which the panel may have hidden."""
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""
    os.write(2, f"{show_cursor}{message}\n".encode())
    os._exit(INTERRUPTED)
