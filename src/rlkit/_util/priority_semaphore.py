"""A semaphore whose waiters are served in order of rank.

Invariant: at most `count` holders at any instant, and the waiter of the lowest rank is next. No place is given once
there is a reason against it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count as counter


class Slots:
    """Places for `count` holders.

    ::

        await slots.acquire((draw, member))
        try:
            ...
        finally:
            slots.release()

    Args:
        count: number of places.
        closed: returns the reason why no more places are given, or None.
        clock: returns the time in seconds for `busy_s`.
    """

    def __init__(
        self,
        count: int,
        *,
        closed: Callable[[], object | None] = lambda: None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.count = self._free = count
        self._closed = closed
        self._clock = clock
        self._changed_s = clock()
        self._busy_s = 0.0
        self._drained = asyncio.Event()
        self._waiting: list[tuple[tuple[int, ...], int, asyncio.Future[None]]] = []
        self._arrivals = counter()

    @property
    def busy_s(self) -> float:
        """Seconds for which places were held up to now, summed over the places."""
        return self._busy_s + (self.count - self._free) * (self._clock() - self._changed_s)

    async def acquire(self, rank: tuple[int, ...]) -> None:
        """Take a place, to be released later; equal ranks are served in order of arrival."""
        if self._free and not self._waiting and self._open():
            self._change(-1)
        else:
            await self._wait(rank)

    async def _wait(self, rank: tuple[int, ...]) -> None:
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place came together with the cancellation
                self.release()
            raise

    def release(self) -> None:
        """Give a place back, or on to the waiter of the lowest rank."""
        if self._waiting and not self._open():
            self._change(1)
            self._open()
            return
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._change(1)

    async def wait_until_drained(self) -> None:
        """Wait until a place was refused and all places are free."""
        await self._drained.wait()

    def _open(self) -> bool:
        """Return whether places are given; a waiter that is refused waits for ever."""
        if self._closed() is None:
            return True
        if self._free == self.count:
            self._drained.set()
        return False

    def _change(self, free: int) -> None:
        self._busy_s, self._changed_s = self.busy_s, self._clock()
        self._free += free
