"""Stopwatch of a rollout, for its time limit.

Invariant: service outages do not count towards a rollout's time limit: neither retries of failed requests, nor waiting
while the service answers no request. Time during which a rollout blocks the event loop counts only for that rollout. No
time is excluded twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Protocol

from rlkit._util.loop_holds import loop_holds

_LOOK_S = 1.0
_TICK_S = 0.001


class Request(Protocol):
    """A request to a service."""

    @property
    def excused_s(self) -> float:
        """Seconds of waiting so far that the service caused."""
        ...

    @property
    def silent_s(self) -> float:
        """Seconds of waiting since the service last answered any request."""
        ...


class OwnWait:
    """Wait inside rlkit that does not count as rollout time, like an outage of the service.

    Args:
        counted_s: seconds at its beginning that count.
    """

    silent_s = 0.0

    def __init__(self, *, counted_s: float = 0.0) -> None:
        self._clock = asyncio.get_running_loop().time
        self._excused_from_s = self._clock() + counted_s

    @property
    def excused_s(self) -> float:
        """Seconds so far that do not count."""
        return max(0.0, self._clock() - self._excused_from_s)


class Stopwatch:
    """Measure the time of one rollout since its creation; `name` is the environment, for findings."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.held_s = 0.0
        self._holds, self._time = loop_holds(), asyncio.get_running_loop().time
        self._started_s = self._excused_until_s = self._clock()
        self._excused_s = 0.0
        self._waiting: dict[Request, float] = {}  # `excused_s` of each when time was last excluded

    def _clock(self) -> float:
        """Return the time of the event loop, minus the time that other rollouts blocked it."""
        return self._time() - self._holds.held_s + self.held_s

    @property
    def played_s(self) -> float:
        """Seconds that count towards the limit."""
        return self._clock() - self._started_s - self._excused_s - max(map(self._new, self._waiting), default=0.0)

    async def wait_for_limit(self, limit_s: float, playing: asyncio.Task[object]) -> bool:
        """Wait for the limit or the end of the rollout; return True if the limit was reached.

        While the rollout waits for a request, checks of the limit are at least a second apart. If the limit is reached
        while the service is silent, it applies only after the service answers any request.
        """
        loop, wake = asyncio.get_running_loop(), asyncio.Event()  # in half the time of `asyncio.wait`
        playing.add_done_callback(lambda _: wake.set())
        while True:
            left_s = limit_s - self.played_s
            if left_s <= 0 and not any(request.silent_s > -left_s for request in self._waiting):
                return True
            timer = loop.call_later(max(left_s, _LOOK_S if self._waiting else _TICK_S), wake.set)
            try:
                await wake.wait()
            finally:
                timer.cancel()
            if playing.done():
                return False
            wake.clear()

    def start_wait(self, request: Request) -> None:
        """Record that the rollout waits for a request."""
        self._waiting[request] = request.excused_s

    def end_wait(self, request: Request) -> None:
        """Record that the rollout no longer waits for a request."""
        new_s = max(map(self._new, self._waiting))
        del self._waiting[request]
        if new_s:
            self._excused_s += new_s
            self._excused_until_s = self._clock()
            self._waiting = {other: other.excused_s for other in self._waiting}

    def _new(self, request: Request) -> float:
        new_s = request.excused_s - self._waiting[request]
        return new_s and min(new_s, self._clock() - self._excused_until_s)  # nearly always 0


_running: ContextVar[frozenset[Stopwatch]] = ContextVar("rlkit_stopwatches", default=frozenset())


def current_stopwatches() -> frozenset[Stopwatch]:
    """Return the stopwatches of the rollouts to which the current asyncio task belongs."""
    return _running.get()


class use_stopwatches:  # noqa: N801  a context manager for every rollout: a generator costs ten times as much
    """Attribute requests made in this context, and in asyncio tasks created in it, to these rollouts."""

    def __init__(self, stopwatches: Iterable[Stopwatch]) -> None:
        self._stopwatches = frozenset(stopwatches)

    def __enter__(self) -> None:
        self._token = _running.set(self._stopwatches)

    def __exit__(self, *_: object) -> None:
        _running.reset(self._token)


class request_wait:  # noqa: N801  a context manager for every request: a generator costs ten times as much
    """Context in which the current rollouts wait for a request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._stopwatches = current_stopwatches()

    def __enter__(self) -> None:
        for stopwatch in self._stopwatches:
            stopwatch.start_wait(self._request)

    def __exit__(self, *_: object) -> None:
        for stopwatch in self._stopwatches:
            stopwatch.end_wait(self._request)
