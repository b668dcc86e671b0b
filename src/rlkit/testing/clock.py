"""A clock that does not wait: an event loop whose time jumps to the next timer.

Invariant: code between two awaits takes no time, and a coroutine that can never go on is reported at once instead of
waiting for ever. What runs in another thread takes no time either, and is waited for.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, override


class Deadlock(RuntimeError):
    """Nothing is ready, no timer is set and no thread is at work: the program would wait for ever."""


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop on virtual time, in seconds from 0.

    ::

        assert rlkit.testing.run_virtual(play_for_an_hour()) == "done"      # in milliseconds
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._in_threads = 0
        super().__init__(_Jumping(self))

    @override
    def time(self) -> float:
        return self._now_s

    @override
    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        self._in_threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._left_thread)
        return future

    @override
    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._in_threads += 1
        try:
            await super().shutdown_default_executor(timeout)
        finally:
            self._in_threads -= 1

    def jump(self, seconds: float | None) -> None:
        """Let time pass until the next timer."""
        if seconds is None:
            raise Deadlock("nothing is ready and no timer is set: the program would wait for ever")
        self._now_s += seconds

    @property
    def waits_for_threads(self) -> bool:
        """Whether a call in another thread is not done yet."""
        return self._in_threads > 0

    def _left_thread(self, _: asyncio.Future[Any]) -> None:
        self._in_threads -= 1


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing but threads."""

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
    """Run a coroutine to its end on virtual time.

    Raises:
        Deadlock: it waits for something that cannot happen.
    """
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(main)
