"""Telling a person now and then how far something is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

EVERY_S = 10.0


@contextmanager
def repeat(tell: Callable[[], None]) -> Generator[None]:
    """Call `tell` every `EVERY_S` seconds on a thread, also when an environment holds up everything else."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(EVERY_S):
            tell()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # it may be in the middle of a line
