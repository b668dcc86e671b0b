"""Counts of a run's work in progress, displayed to the user.

Invariant: reporting waits for nothing but a short lock, and changes only a count. Counts of 0 are not displayed.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar


class Activity:
    """Counts by kind of work, such as `replies in progress`. Any thread may report and read.

    ::

        with current_activity().track("programs"):
            await runner.run(program, limits)
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def put(self, kind: str, count: int) -> None:
        """Set the count of a kind."""
        with self._lock:
            self._counts[kind] = count

    def add(self, kind: str, count: int = 1) -> None:
        """Add to the count of a kind; `count` may be negative."""
        with self._lock:
            self._counts[kind] = self._counts.get(kind, 0) + count

    @contextmanager
    def track(self, kind: str, count: int = 1) -> Generator[None]:
        """Count work of a kind while the block runs."""
        self.add(kind, count)
        try:
            yield
        finally:
            self.add(kind, -count)

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts that are not 0, in the order in which their kinds were first reported."""
        with self._lock:
            return {kind: count for kind, count in self._counts.items() if count}

    def __str__(self) -> str:
        return ", ".join(f"{kind}: {count:,}" for kind, count in self.counts.items())


_current: ContextVar[Activity | None] = ContextVar("rlkit_activity", default=None)


def current_activity() -> Activity:
    """Return the activity of the current run; outside of a run, return a new one that nobody displays."""
    return _current.get() or Activity()


@contextmanager
def use_activity(activity: Activity) -> Generator[None]:
    """Let `current_activity` return `activity` in this context, and in asyncio tasks created in it."""
    token = _current.set(activity)
    try:
        yield
    finally:
        _current.reset(token)
