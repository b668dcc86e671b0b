"""How many trials may be in which phase.

Invariant: what a trial holds of a gate it gives back, however it ends. Waiting at a gate is not the rollout's own time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from rlkit._util.stopwatch import request_wait


@dataclass(frozen=True)
class PhaseLimits:
    """How many trials may be in a phase at one time, and how many may start in a second; None for any number."""

    starting: int | None = None
    playing: int | None = None
    verifying: int | None = None
    starts_per_s: float | None = None


class GatePass:
    """What one trial holds of the gates."""

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self._held = set[asyncio.Semaphore]()
        self.waited_s = 0.0
        """Seconds that it has waited at the gates."""

    async def start(self) -> None:
        """Wait until its environment may start."""
        await self._through(self._gates.starting)
        if (left_s := self._gates.turn_to_start_s()) > 0:
            with _Queue(self):
                await asyncio.sleep(left_s)

    async def play(self) -> None:
        """It has started, or another step of it begins: wait until its agent may work."""
        self.leave()
        await self._through(self._gates.playing)

    async def verify(self) -> None:
        """Wait until its tests may run."""
        self.leave()
        await self._through(self._gates.verifying)

    def leave(self) -> None:
        """Give back whatever it holds."""
        for gate in self._held:
            gate.release()
        self._held.clear()

    async def _through(self, gate: asyncio.Semaphore | None) -> None:
        if gate is not None:
            with _Queue(self):
                await gate.acquire()
            self._held.add(gate)


class _Queue:
    """Time at a gate: a rollout is excused for it as it is for a service that does not answer."""

    silent_s = 0.0

    def __init__(self, passing: GatePass) -> None:
        self._passing = passing
        self._clock = asyncio.get_running_loop().time
        self._since_s = self._clock()
        self._excusing = request_wait(self)

    @property
    def excused_s(self) -> float:
        return self._clock() - self._since_s

    def __enter__(self) -> None:
        self._excusing.__enter__()

    def __exit__(self, *_: object) -> None:
        self._excusing.__exit__()
        self._passing.waited_s += self.excused_s


class Gates:
    """The gates of one environment of a run, on one event loop."""

    def __init__(self, limits: PhaseLimits) -> None:
        counts = (limits.starting, limits.playing, limits.verifying)
        semaphores = (None if count is None else asyncio.Semaphore(count) for count in counts)
        self.starting, self.playing, self.verifying = semaphores
        self._apart_s = 0.0 if limits.starts_per_s is None else 1 / limits.starts_per_s
        self._next_start_s = 0.0

    def enter(self) -> GatePass:
        """Return what one more trial holds."""
        return GatePass(self)

    def turn_to_start_s(self) -> float:
        """Return the seconds until one more environment may start, which it is then taken to do."""
        now_s = asyncio.get_running_loop().time()
        at_s = max(now_s, self._next_start_s)
        self._next_start_s = at_s + self._apart_s
        return at_s - now_s


_gates = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, PhaseLimits], Gates]]()


def gates(name: str, limits: PhaseLimits) -> Gates:
    """Return the gates of all tasks with this name and these limits, which are pickled and so cannot hold them."""
    own = _gates.setdefault(asyncio.get_running_loop(), {})
    return own.setdefault((name, limits), Gates(limits))
