"""One answer in time, waited for by the task that asks.

Invariant: a request that is answered costs no task and no timer of its own: a run makes a hundred thousand of them, and
nearly all are answered long before their time. What may be lost is asked for a second time beside the first request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from typing import Protocol

from rlkit.errors import ServiceError

_ALMOST_S = 1e-6


class NoAnswer(ServiceError):
    """All the time that an answer may take is over: the request is not made again."""


class Waiting(Protocol):
    """A wait for an answer that has a limit."""

    context: Context

    def due(self) -> float:
        """Act on the limit, and return the time of the next one, which may be infinite."""
        ...


class Deadlines:
    """Up to when each request is waited for: one timer of the event loop for all."""

    def __init__(self) -> None:
        self._until_s: dict[Waiting, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def put(self, patience: Waiting, until_s: float) -> None:
        """Call its `due` at that time of the event loop."""
        self._until_s[patience] = until_s
        if self._timer is None or until_s < self._timer.when():
            self._arm(until_s)

    def drop(self, patience: Waiting) -> None:
        """Forget it. The timer stays: the next request would only set it again."""
        del self._until_s[patience]

    def _arm(self, until_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if until_s == math.inf else loop.call_at(until_s, self._ring, context=Context())

    def _ring(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time() + _ALMOST_S
        for patience in [patience for patience, until_s in self._until_s.items() if until_s <= now]:
            self._until_s[patience] = patience.context.run(patience.due)
        self._arm(min(self._until_s.values(), default=math.inf))


class Patience[T]:
    """The wait for one answer.

    Args:
        deadlines: the deadlines of all requests.
        within_s: limit in seconds; after half of it the request is made again.
        again: repeats the request until there is an answer; None where it must not be made twice.
    """

    def __init__(
        self, deadlines: Deadlines, within_s: float, *, again: Callable[[], Coroutine[object, object, T]] | None
    ) -> None:
        self.context = copy_context()
        self._deadlines = deadlines
        self._again = again
        self._within_s = within_s
        self._wait_s = within_s if again is None else within_s / 2
        self._beside: asyncio.Task[T] | None = None
        self._task: asyncio.Task[object] | None = None
        self._stopped = self._over = False

    async def wait(self, answer: Awaitable[T], what: str) -> T:
        """Return the first answer of the two requests, or raise what the second failed with.

        Args:
            answer: awaits the first request.
            what: the thing asked for, such as "sampling".

        Raises:
            NoAnswer: there was none in time.
            ServiceError: the first request failed before there was a second one.
        """
        task = asyncio.current_task()
        assert task is not None, "whoever awaits is a task"
        self._task, cancelling = task, task.cancelling()
        self._deadlines.put(self, asyncio.get_running_loop().time() + self._wait_s)
        try:
            try:
                return await answer
            except ServiceError:
                if self._beside is None:
                    raise
                return await self._beside  # until it answers, or there is no time left
        except asyncio.CancelledError:
            if not self._stopped or task.cancelling() > cancelling + 1:  # somebody else cancelled it, too
                raise
            if self._beside is not None and self._beside.done() and not self._beside.cancelled():
                return self._beside.result()
            raise NoAnswer(f"{what}: no answer within {self._within_s:g} s") from None
        finally:
            self._deadlines.drop(self)
            self._over = True
            if self._stopped:
                task.uncancel()
            if self._beside is not None:
                self._beside.cancel()

    def due(self) -> float:
        """Ask once more, or give up; return the time at which this is to be called again."""
        if self._again is None or self._beside is not None:
            self._stop()
            return math.inf
        loop = asyncio.get_running_loop()
        self._beside = loop.create_task(self._again())
        self._beside.add_done_callback(self._answered)
        return loop.time() + self._wait_s

    def _answered(self, beside: asyncio.Task[T]) -> None:
        if not beside.cancelled() and beside.exception() is None:
            self._stop()

    def _stop(self) -> None:
        """Wake the task that waits: the first request is given up."""
        if self._task is not None and not self._stopped and not self._over:
            self._stopped = True
            self._task.cancel()
