"""Limits on the number of trials in each phase.

Invariant: a trial releases every gate that it holds, however it ends. Waiting at a gate does not count as rollout time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from rlkit._util.stopwatch import OwnWait, request_wait


@dataclass(frozen=True)
class PhaseLimits:
    """Maximum number of concurrent trials in each phase, and of starts per second; None for no limit."""

    starting: int | None = None
    playing: int | None = None
    verifying: int | None = None
    starts_per_s: float | None = None


class GatePass:
    """The gates that one trial holds."""

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self._gates_held = set[asyncio.Semaphore]()
        self.waited_s = 0.0  # seconds that the trial has waited at gates

    async def wait_to_start(self) -> None:
        """Wait until the trial's environment may start."""
        await self._acquire(self._gates.starting)
        if (left_s := self._gates.reserve_start_s()) > 0:
            with self._excused_wait():
                await asyncio.sleep(left_s)

    async def wait_to_play(self) -> None:
        """Wait until the trial's agent may work, at the start or in another step."""
        self.release()
        await self._acquire(self._gates.playing)

    async def wait_to_verify(self) -> None:
        """Wait until the trial's tests may run."""
        self.release()
        await self._acquire(self._gates.verifying)

    def release(self) -> None:
        """Release all gates that the trial holds."""
        for gate in self._gates_held:
            gate.release()
        self._gates_held.clear()

    async def _acquire(self, gate: asyncio.Semaphore | None) -> None:
        if gate is not None:
            with self._excused_wait():
                await gate.acquire()
            self._gates_held.add(gate)

    @contextmanager
    def _excused_wait(self) -> Generator[None]:
        wait = OwnWait()
        try:
            with request_wait(wait):
                yield
        finally:
            self.waited_s += wait.excused_s


class Gates:
    """The gates of one environment of a run, on one event loop."""

    def __init__(self, limits: PhaseLimits) -> None:
        counts = (limits.starting, limits.playing, limits.verifying)
        semaphores = (None if count is None else asyncio.Semaphore(count) for count in counts)
        self.starting, self.playing, self.verifying = semaphores
        self._start_interval_s = 0.0 if limits.starts_per_s is None else 1 / limits.starts_per_s
        self._next_start_s = 0.0

    def reserve_start_s(self) -> float:
        """Reserve the next start of an environment, and return the seconds until then."""
        now_s = asyncio.get_running_loop().time()
        start_s = max(now_s, self._next_start_s)
        self._next_start_s = start_s + self._start_interval_s
        return start_s - now_s


_gates = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[PhaseLimits, Gates]]()


def get_gates(limits: PhaseLimits) -> Gates:
    """Return the gates shared by all tasks with these limits, which cannot hold them because they are pickled."""
    return _gates.setdefault(asyncio.get_running_loop(), {}).setdefault(limits, Gates(limits))
