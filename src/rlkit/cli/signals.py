"""Ctrl-C: the first finishes what is being done and saves, the second stops.

Invariant: after the second signal the process ends, whatever holds it up.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Never

from rlkit.cli.guard import INTERRUPTED

CLEAN_UP_S = 10.0
"""What clean-up (containers, the engine) may take after the second signal."""


@contextmanager
def graceful(
    request: Callable[[], None], say: Callable[[str], None], *, message: str, clean_up_s: float = CLEAN_UP_S
) -> Generator[None]:
    """While it is open, the first SIGINT or SIGTERM calls `request` and the second raises KeyboardInterrupt.

    A clean-up that takes longer than `clean_up_s` after that, or a third signal, ends the process with code 130.

    Args:
        say: is given `message` at the first signal, on another thread.
    """
    received = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received == 1:
            request()
            # Another thread, because this one may be inside a write to the same stream.
            threading.Thread(target=say, args=(message,), daemon=True).start()
        elif received == 2:
            threading.Thread(target=_end_in, args=(clean_up_s,), daemon=True).start()
            raise KeyboardInterrupt
        else:
            _end("stopped without cleaning up")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if received < 2:  # past that, Ctrl-C during the clean-up must still end the process
            for number, handler in before.items():
                signal.signal(number, handler)


def _end_in(seconds: float) -> None:
    threading.Event().wait(seconds)
    _end(f"stopped: cleaning up took longer than {seconds:.0f} s")


def _end(message: str) -> Never:
    """End the process, past every lock that may be held, with the cursor that a panel may have hidden shown again."""
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""
    os.write(2, f"{show_cursor}{message}\n".encode())
    os._exit(INTERRUPTED)
