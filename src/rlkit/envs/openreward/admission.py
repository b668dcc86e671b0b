"""How many sessions are open at once, and when the next one may be tried.

A server that has too much to do answers 429. The limit is then halved, and grows with the sessions that are opened
without trouble, as TCP does it. After a session that could not be opened, the next ones wait,
for longer with each failure in a row, and each for a time of its own, so that they do not come back all at once.

Invariant: waiting to be admitted is not the rollout's own time. A place is given back however a session ends.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from random import Random
from weakref import WeakKeyDictionary

from rlkit._util.stopwatch import request_wait

_CALM_S = 1.0
"""What comes back within this time was sent before the limit was lowered, and does not lower it again."""

_LEAST_GROWTH = 1 / 8
"""What a session adds that was opened. One over the limit, as TCP has it, would take thousands to bring back 256."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Limit:
    """The number of sessions that a server takes, as its answers show it; never above `most`, which is 1 at least."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calm_from_s = -math.inf
        self.value = float(most)
        """Sessions at once, from 1 to `most`; what is behind the point counts towards the next one."""
        self.failures = 0
        """Sessions in a row that could not be opened."""

    def opened(self) -> None:
        """A session was opened."""
        self.failures = 0
        self.value = min(float(self._most), self.value + max(_LEAST_GROWTH, 1 / self.value))

    def refused(self, active: int, now_s: float) -> None:
        """The server asked for patience while so many sessions were open or asked for."""
        self.failures += 1
        if now_s >= self._calm_from_s:
            self.value = max(1.0, min(self.value, active) / 2)
            self._calm_from_s = now_s + _CALM_S

    def failed(self) -> None:
        """A session could not be opened, for another reason."""
        self.failures += 1

    def pause_s(self, random: Random) -> float:
        """Seconds that whoever comes after a failure waits before it tries."""
        whole_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(max(self.failures - 1, 0), 16))
        return whole_s * random.uniform(0.5, 1.0)


class Gate:
    """Admits rollouts to the sessions of one environment, at most `most` at once, first come, first served."""

    def __init__(self, most: int) -> None:
        self.limit = Limit(most)
        self._random = Random()  # spreads what waits; what is trained on does not depend on it
        self.active = 0
        """Rollouts that were admitted and have not left."""
        self._queue = deque[asyncio.Future[None]]()

    @asynccontextmanager
    async def admitted(self) -> AsyncGenerator[None]:
        """Wait for a place, and hold it."""
        with request_wait(_Wait()):
            await self._enter()
        try:
            yield
        finally:
            self.active -= 1
            self._admit()

    async def pause(self) -> None:
        """Wait, if sessions fail, before one more is tried."""
        if not self.limit.failures:
            return
        with request_wait(_Wait()):
            await asyncio.sleep(self.limit.pause_s(self._random))

    def opened(self) -> None:
        """A session was opened."""
        self.limit.opened()
        self._admit()

    def refused(self) -> None:
        """The server asked for patience."""
        self.limit.refused(self.active + 1, asyncio.get_running_loop().time())

    async def _enter(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had its place, and nobody takes it
                self.active -= 1
            else:
                with suppress(ValueError):  # it may have been passed over already
                    self._queue.remove(turn)
            self._admit()
            raise

    def _admit(self) -> None:
        while self._queue and self.active < int(self.limit.value):
            turn = self._queue.popleft()
            if not turn.cancelled():
                self.active += 1
                turn.set_result(None)


class _Wait:
    """A wait that the rollout is excused for, as it is for a service that does not answer."""

    silent_s = 0.0

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._since_s = self._clock()

    @property
    def excused_s(self) -> float:
        return self._clock() - self._since_s


_gates = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[object, int], Gate]]()


def gate(of: object, most: int) -> Gate:
    """The gate that all tasks of one environment share: tasks are pickled, so they cannot hold it."""
    own = _gates.setdefault(asyncio.get_running_loop(), {})
    if (of, most) not in own:
        own[of, most] = Gate(most)
    return own[of, most]
