"""Admission of rollouts to sessions: a limit of open sessions, and pauses after failures.

An overloaded server answers 429. The limit is then halved, and grows again with each session that is opened, as in TCP.
After a session could not be opened, the next attempts wait: longer after each consecutive failure, with random jitter.

Invariant: waiting for admission does not count as rollout time. A slot is always released when its session ends.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from random import Random
from weakref import WeakKeyDictionary

from anyio import CapacityLimiter

from rlkit._util.stopwatch import OwnWait, request_wait

_CALM_S = 1.0  # time after a reduction in which 429 answers are ignored, because their requests were sent before it
_MIN_GROWTH = 1 / 8
"""Growth of the limit per opened session. TCP's one over the limit would take thousands of sessions to reach 256."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Gate:
    """Gate to the concurrent sessions of one environment, in order of arrival; its limit is at most `max_sessions`."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._calm_from_s = -math.inf
        self._random = Random()  # jitter of retries; training does not depend on it
        self._slots = CapacityLimiter(max_sessions)
        self.limit = float(max_sessions)  # concurrent sessions, from 1; the fraction accumulates to the next session
        self.failures = 0  # consecutive sessions that could not be opened

    @property
    def active(self) -> int:
        """Number of rollouts inside the gate."""
        return self._slots.borrowed_tokens

    @asynccontextmanager
    async def admitted(self) -> AsyncGenerator[None]:
        """Wait for a slot, and hold it."""
        holder = object()
        with request_wait(OwnWait()):
            await self._slots.acquire_on_behalf_of(holder)
        try:
            yield
        finally:
            self._slots.release_on_behalf_of(holder)

    async def pause(self) -> None:
        """Pause before the next attempt if the last sessions failed."""
        if not self.failures:
            return
        max_pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self.failures - 1, 16))
        with request_wait(OwnWait()):
            await asyncio.sleep(max_pause_s * self._random.uniform(0.5, 1.0))

    def opened(self) -> None:
        """Record that a session was opened."""
        self.failures = 0
        self._set_limit(min(float(self._max_sessions), self.limit + max(_MIN_GROWTH, 1 / self.limit)))

    def refused(self) -> None:
        """Record that the server rejected a request with 429."""
        self.failures += 1
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._calm_from_s:
            self._set_limit(max(1.0, min(self.limit, self.active + 1) / 2))
            self._calm_from_s = now_s + _CALM_S

    def failed(self) -> None:
        """Record that a session could not be opened for another reason."""
        self.failures += 1

    def _set_limit(self, limit: float) -> None:
        self.limit = limit
        self._slots.total_tokens = int(limit)


_gates = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[object, int], Gate]]()


def gate(environment: object, max_sessions: int) -> Gate:
    """Return the gate shared by all tasks of an environment, which cannot hold it because they are pickled."""
    gates = _gates.setdefault(asyncio.get_running_loop(), {})
    return gates.setdefault((environment, max_sessions), Gate(max_sessions))
