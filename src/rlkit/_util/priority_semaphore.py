"""A semaphore that serves waiters in order of rank, and that can be closed.

Invariant: there are at most `count` holders, and the waiter with the lowest rank is next. A closed semaphore stays
closed.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count as counter


class SlotsClosed(Exception):
    """The semaphore is closed."""


class Slots:
    """Places for `count` holders.

    ::

        await slots.acquire((draw, member))
        try:
            ...
        finally:
            slots.release()

    Args:
        find_close_reason: returns a reason to close, or None; called at each `acquire` and `release`.
        clock: returns the time in seconds, for `busy_s`.
        on_close: receives the reason once.
    """

    def __init__(
        self,
        count: int,
        *,
        find_close_reason: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = lambda: 0.0,
        on_close: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.count = self._free = count
        self.close_reason: str | None = None  # reason for closing; None while open
        self._find_close_reason = find_close_reason
        self._on_close = on_close
        self._clock = clock
        self._changed_s = clock()
        self._busy_s = 0.0
        self._waiting: list[tuple[tuple[int, ...], int, asyncio.Future[None]]] = []
        self._arrivals = counter()

    @property
    def busy_s(self) -> float:
        """Seconds that places were held so far, summed over the places."""
        return self._busy_s + (self.count - self._free) * (self._clock() - self._changed_s)

    async def acquire(self, rank: tuple[int, ...]) -> None:
        """Acquire a place, equal ranks in order of arrival; raise SlotsClosed if the semaphore is closed."""
        if self._is_closed():
            raise SlotsClosed(self.close_reason)
        if self._free and not self._waiting:
            self._change_free(-1)
        else:
            await self._wait(rank)

    async def _wait(self, rank: tuple[int, ...]) -> None:
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release()  # the place was granted at the time of the cancellation
            raise

    def release(self) -> None:
        """Release a place to the waiter with the lowest rank."""
        if self._waiting and not self._is_closed():
            while self._waiting:
                turn = heapq.heappop(self._waiting)[2]
                if not turn.done():
                    turn.set_result(None)
                    return
        self._change_free(1)

    def _is_closed(self) -> bool:
        """Return whether the semaphore is closed; at the moment of closing, reject all waiters."""
        if self.close_reason is None and (reason := self._find_close_reason()) is not None:
            self.close_reason = reason
            for _, _, turn in self._waiting:
                if not turn.done():
                    turn.set_exception(SlotsClosed(reason))
            self._waiting.clear()
            self._on_close(reason)
        return self.close_reason is not None

    def _change_free(self, change: int) -> None:
        self._busy_s, self._changed_s = self.busy_s, self._clock()
        self._free += change
