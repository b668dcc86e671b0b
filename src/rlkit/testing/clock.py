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
        self._now_s = 0.0
        self._thread_calls = 0
        super().__init__(_JumpingSelector(self))

    @override
    def time(self) -> float:
        return self._now_s

    @override
    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        self._thread_calls += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._count_end)
        return future

    @override
    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._thread_calls += 1
        try:
            await super().shutdown_default_executor(timeout)
        finally:
            self._thread_calls -= 1

    def jump(self, seconds: float | None) -> None:
        """Advance the time by `seconds`, the wait for the next timer; None, without a timer, is a deadlock."""
        if seconds is None:
            raise DeadlockError("nothing is ready and no timer is set: the program would wait forever")
        self._now_s += seconds

    @property
    def waits_for_threads(self) -> bool:
        """True while a call in another thread runs."""
        return self._thread_calls > 0

    def _count_end(self, _: asyncio.Future[Any]) -> None:
        self._thread_calls -= 1


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that never sleeps: it advances the clock to the next timer, or waits for running threads."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self._clock.waits_for_threads:
            return super().select(None)
        self._clock.jump(timeout)
        return ready


def run_virtual[T](main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on virtual time; DeadlockError if it waits for what cannot happen."""
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(main)
