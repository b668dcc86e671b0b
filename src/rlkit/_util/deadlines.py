"""Deadlines of requests, and the wait for an answer.

Invariant: an answered request costs no asyncio task and no timer of its own, because a run makes a hundred thousand
requests and nearly all are answered long before their deadline. A possibly lost request is repeated in parallel.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any

from rlkit.errors import ServiceError

_EPSILON_S = 1e-6


class NoAnswer(ServiceError):
    """No answer came within the time limit. The request is not retried."""


class Deadlines:
    """Deadlines of all waits, with one timer on the event loop."""

    def __init__(self) -> None:
        self._until_s: dict[AnswerWait[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def put(self, wait: AnswerWait[Any], until_s: float) -> None:
        """Call `wait.on_deadline` at the time `until_s` of the event loop."""
        self._until_s[wait] = until_s
        if self._timer is None or until_s < self._timer.when():
            self._arm(until_s)

    def drop(self, wait: AnswerWait[Any]) -> None:
        """Remove a wait. The timer stays, because the next request would set it again."""
        del self._until_s[wait]

    def _arm(self, until_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if until_s == math.inf else loop.call_at(until_s, self._on_timer, context=Context())

    def _on_timer(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time() + _EPSILON_S
        for wait in [wait for wait, until_s in self._until_s.items() if until_s <= now_s]:
            self._until_s[wait] = wait.context.run(wait.on_deadline)
        self._arm(min(self._until_s.values(), default=math.inf))


class AnswerWait[T]:
    """The wait for one answer.

    Args:
        timeout_s: limit in seconds; the request is repeated after half of it.
        repeat: repeats the request until it is answered; None for a request that must not be sent twice.
    """

    def __init__(
        self, deadlines: Deadlines, timeout_s: float, *, repeat: Callable[[], Coroutine[object, object, T]] | None
    ) -> None:
        self.context = copy_context()
        self._deadlines = deadlines
        self._repeat = repeat
        self._timeout_s = timeout_s
        self._wait_s = timeout_s if repeat is None else timeout_s / 2
        self._second: asyncio.Task[T] | None = None
        self._task: asyncio.Task[object] | None = None
        self._has_cancelled_task = self._has_ended = False

    async def wait(self, answer: Awaitable[T], activity: str) -> T:
        """Return the first answer of the two requests, or raise the error of the second.

        Args:
            activity: phrase for messages, such as "sampling".

        Raises:
            NoAnswer: no request was answered in time.
            ServiceError: the first request failed before it was repeated.
        """
        task = asyncio.current_task()
        assert task is not None, "only a task can await"
        self._task, cancelling = task, task.cancelling()
        self._deadlines.put(self, asyncio.get_running_loop().time() + self._wait_s)
        try:
            try:
                return await answer
            except ServiceError:
                if self._second is None:
                    raise
                return await self._second  # the deadline ends this wait if the second request is not answered either
        except asyncio.CancelledError:
            if not self._has_cancelled_task or task.cancelling() > cancelling + 1:  # the caller cancelled it too
                raise
            if self._second is not None and self._second.done() and not self._second.cancelled():
                return self._second.result()
            raise NoAnswer(f"{activity}: no answer within {self._timeout_s:g} s") from None
        finally:
            self._deadlines.drop(self)
            self._has_ended = True
            if self._has_cancelled_task:
                task.uncancel()
            if self._second is not None:
                self._second.cancel()

    def on_deadline(self) -> float:
        """Repeat the request, or stop waiting; return the time of the next deadline, which may be infinite."""
        if self._repeat is None or self._second is not None:
            self._stop()
            return math.inf
        loop = asyncio.get_running_loop()
        self._second = loop.create_task(self._repeat())
        self._second.add_done_callback(self._stop_if_answered)
        return loop.time() + self._wait_s

    def _stop_if_answered(self, second: asyncio.Task[T]) -> None:
        if not second.cancelled() and second.exception() is None:
            self._stop()

    def _stop(self) -> None:
        """Cancel the waiting task, and with it the first request."""
        if self._task is not None and not self._has_cancelled_task and not self._has_ended:
            self._has_cancelled_task = True
            self._task.cancel()
