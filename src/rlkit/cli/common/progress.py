"""Periodic progress messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

EVERY_S = 10.0


@contextmanager
def report_periodically(report: Callable[[], None]) -> Generator[None]:
    """Call `report` every `EVERY_S` seconds on a thread, even while an environment blocks the event loop."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(EVERY_S):
            report()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()  # the thread may be writing a line
