"""Admission of rollouts to sessions: number of open sessions, and pauses after failures.

A server that has too much to do answers 429. The limit is then halved, and grows with the sessions that are opened
without trouble, as TCP does it. After a session that could not be opened, the next ones wait,
for longer with each failure in a row, and each for a time of its own, so that they do not come back all at once.

Invariant: waiting for admission does not count as the rollout's time. A place is always released when a session ends.
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
"""Time after a reduction in which refusals are ignored, since their requests were sent before it."""

_MIN_GROWTH = 1 / 8
"""Growth of the limit per opened session. TCP's one over the limit would take thousands of sessions to reach 256."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Limit:
    """Adaptive limit of concurrent sessions, from 1 to `max_sessions`."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._calm_from_s = -math.inf
        self.value = float(max_sessions)
        """Concurrent sessions, from 1 to `max_sessions`; the fraction counts towards the next one."""
        self.failures = 0
        """Consecutive sessions that could not be opened."""

    def opened(self) -> None:
        """Record that a session was opened."""
        self.failures = 0
        self.value = min(float(self._max_sessions), self.value + max(_MIN_GROWTH, 1 / self.value))

    def refused(self, active: int, now_s: float) -> None:
        """Record that the server refused a request with so many sessions open or requested."""
        self.failures += 1
        if now_s >= self._calm_from_s:
            self.value = max(1.0, min(self.value, active) / 2)
            self._calm_from_s = now_s + _CALM_S

    def failed(self) -> None:
        """Record that a session could not be opened for another reason."""
        self.failures += 1

    def pause_s(self, random: Random) -> float:
        """Return the pause in seconds before the next attempt after failures."""
        whole_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(max(self.failures - 1, 0), 16))
        return whole_s * random.uniform(0.5, 1.0)


class Gate:
    """Gate to the sessions of one environment, at most `max_sessions` at once, first come, first served."""

    def __init__(self, max_sessions: int) -> None:
        self.limit = Limit(max_sessions)
        self._random = Random()  # spreads retries; training does not depend on it
        self.active = 0
        """Rollouts inside the gate."""
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
        """Pause before the next attempt if sessions fail."""
        if not self.limit.failures:
            return
        with request_wait(_Wait()):
            await asyncio.sleep(self.limit.pause_s(self._random))

    def opened(self) -> None:
        """Record that a session was opened."""
        self.limit.opened()
        self._admit()

    def refused(self) -> None:
        """Record that the server refused a request."""
        self.limit.refused(self.active + 1, asyncio.get_running_loop().time())

    async def _enter(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was admitted, so it must release its place
                self.active -= 1
            else:
                with suppress(ValueError):  # it may have been skipped already
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
    """Wait that is excused from the rollout's time, like an outage of the service."""

    silent_s = 0.0

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._since_s = self._clock()

    @property
    def excused_s(self) -> float:
        return self._clock() - self._since_s


_gates = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[object, int], Gate]]()


def gate(environment: object, max_sessions: int) -> Gate:
    """Return the gate that all tasks of one environment share: tasks are pickled, so they cannot hold it."""
    gates = _gates.setdefault(asyncio.get_running_loop(), {})
    if (environment, max_sessions) not in gates:
        gates[environment, max_sessions] = Gate(max_sessions)
    return gates[environment, max_sessions]
