"""Fewer looks for garbage while a run holds much that is none.

Invariant: when the last run of the process has ended, the collector looks as often as before, and through everything.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

_NEW_OBJECTS = 10_000
"""Objects made, less those gone, between two looks; Python's own number makes them a tenth of a run's work."""

_earlier: list[tuple[int, int, int]] = []


@contextmanager
def rare_collections() -> Generator[None]:
    """Inside, what was there before is not looked through for garbage, and what is new less often.

    A look through all that the libraries of a run hold keeps the event loop for a tenth of a second or more, and finds
    nothing. It may be entered many times at once.
    """
    if not _earlier:
        gc.freeze()
    _earlier.append(gc.get_threshold())
    new, *older = _earlier[0]
    if new:  # or the user has switched it off
        gc.set_threshold(max(new, _NEW_OBJECTS), *older)
    try:
        yield
    finally:
        first = _earlier[0]
        _earlier.pop()
        if not _earlier:
            gc.unfreeze()
            gc.set_threshold(*first)
