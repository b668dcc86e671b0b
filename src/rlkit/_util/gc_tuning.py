"""Less frequent garbage collection during a run, and the return of freed memory after it.

Invariant: after the last run of the process, the collector has its previous thresholds and covers all objects.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Generator
from contextlib import contextmanager, suppress

_NEW_OBJECTS = 20_000
"""Net new objects between two collections; with Python's default, collections take a tenth of a run's time."""

_previous_thresholds: list[tuple[int, int, int]] = []


def return_free_memory() -> None:
    """Give freed memory back to the system. glibc keeps gigabytes of a model's gradients otherwise."""
    with suppress(OSError, AttributeError):  # another C library has no such function
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def rare_garbage_collection() -> Generator[None]:
    """Context that excludes existing objects from garbage collection, and collects new objects less often.

    A collection over all objects of the imported libraries blocks the event loop for 0.1 s or more and frees nothing.
    Several runs may enter the context at once.
    """
    if not _previous_thresholds:
        gc.freeze()
    _previous_thresholds.append(gc.get_threshold())
    new, *older = _previous_thresholds[0]
    if new:  # 0 if the user has disabled it
        gc.set_threshold(max(new, _NEW_OBJECTS), *older)
    try:
        yield
    finally:
        first = _previous_thresholds[0]
        _previous_thresholds.pop()
        if not _previous_thresholds:
            gc.unfreeze()
            gc.set_threshold(*first)
