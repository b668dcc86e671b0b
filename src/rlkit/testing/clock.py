"""Virtual clock: an event loop whose time jumps to the next timer.

Invariant: virtual time advances only in timers; code and awaited thread calls take no virtual time. A deadlock raises
immediately.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, override


class DeadlockError(RuntimeError):
    """Raised when nothing is ready, no timer is set and no thread is running, so the program would wait forever."""


class VirtualClock(asyncio.SelectorEventLoop):
    """Event loop on virtual time, in seconds from 0.

    ::

        assert rlkit.testing.run_virtual(play_for_an_hour()) == "done"      # in milliseconds
    """

    def __init__(self) -> None:
        self._waits = _JumpingSelector()
        super().__init__(self._waits)

    @override
    def time(self) -> float:
        return self._waits.now_s

    @override
    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self._waits.thread_calls.add(future)
        future.add_done_callback(self._waits.thread_calls.remove)
        return future

    @override
    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._waits.thread_calls.add(self)
        try:
            await super().shutdown_default_executor(timeout)
        finally:
            self._waits.thread_calls.remove(self)

    def jump(self, seconds: float) -> None:
        """Advance the time, as code that blocks the loop does on a real clock."""
        self._waits.now_s += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that never sleeps: it advances the clock to the next timer, or waits for running threads."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.thread_calls = set[object]()

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self.thread_calls:
            return super().select(None)
        if timeout is None:
            raise DeadlockError("nothing is ready and no timer is set: the program would wait forever")
        self.now_s += timeout
        return ready


def run_virtual[T](main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on virtual time; DeadlockError if it waits for what cannot happen."""
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(main)
