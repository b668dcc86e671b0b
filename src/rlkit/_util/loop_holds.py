"""Time for which a rollout blocks ("holds") the event loop, and the line of code that blocks it.

Invariant: the duration of a long hold is known as soon as the hold ends, before other code runs on the loop. A watching
thread finds the line, because the blocked loop cannot. A callback that only waited for a processor on a busy machine is
not reported.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

from rlkit._util.frames import Place, stack_place

HOLD_S = 0.1  # minimum duration of a hold in seconds; shorter callbacks are normal work
REPORTED_HOLD_S = 0.5  # length from which a hold is reported
_LOOK_S = 0.1
_frames = sys._current_frames  # pyright: ignore[reportPrivateUsage]  documented, for this


class RolloutClock(Protocol):
    """A clock to which the holds of its rollout are charged."""

    name: str
    """The environment of the rollout."""

    held_s: float
    """Seconds for which the rollout held the loop."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A long callback of the event loop, during which nothing else could run."""

    env: str  # name of the environment whose code ran
    seconds: float
    place: Place | None  # line of code observed most often; None if none was observed


@dataclass(slots=True, eq=False)
class _Step:
    """The current callback of user code, with the clocks of its rollouts.

    `places` counts the observed lines; it stays None for nearly all callbacks.
    """

    charged: Collection[RolloutClock]
    env: str
    began_s: float
    places: Counter[Place] | None = None


class LoopHolds:
    """The holds of one event loop."""

    def __init__(self) -> None:
        self._step: _Step | None = None
        self._tell: Callable[[Hold], None] | None = None
        self._waited_s = 0.0  # wait for a processor, when the watch last observed a new step
        self.held_s = 0.0  # seconds of all holds so far
        self._busy_s = 0.0
        self._lap_s: float | None = None

    @property
    def now_s(self) -> float:
        """The loop's time, minus all holds."""
        return _clock() - self.held_s

    def begin(self, charged: Collection[RolloutClock], env: str = "") -> bool:
        """Begin a step of user code; return False if it is nested in another step."""
        if self._step is not None:
            return False
        self._step = _Step(charged, env, _clock())
        return True

    def end(self) -> None:
        """End the current step, and charge it to its rollouts if it was a hold."""
        step, self._step = self._step, None
        if step is None:
            return
        seconds = _clock() - step.began_s
        self._busy_s += seconds
        if seconds < HOLD_S:
            return
        self.held_s += seconds
        names = [step.env] if step.env else []
        for clock in step.charged:
            clock.held_s += seconds
            if clock.name:  # the clock of a part of a rollout has no name
                names.append(clock.name)
        if self._tell is None or seconds < REPORTED_HOLD_S or not names:
            return
        if seconds - (processor_wait_s(threading.get_native_id()) - self._waited_s) >= REPORTED_HOLD_S:
            place = step.places.most_common(1)[0][0] if step.places else None
            asyncio.get_running_loop().call_soon(self._tell, Hold(names[0], seconds, place))

    def lap(self) -> float:
        """Return the share of the time since the last call in which steps of user code ran."""
        now_s, busy_s = _clock(), self._busy_s
        passed_s = now_s - self._lap_s if self._lap_s is not None else 0.0
        self._lap_s, self._busy_s = now_s, 0.0
        return busy_s / passed_s if passed_s else 0.0

    @contextmanager
    def watch(
        self,
        tell: Callable[[Hold], None] | None,
        *,
        limit_s: float = math.inf,
        end: Callable[[Place], object] = lambda place: None,
    ) -> Generator[None]:
        """Watch for long holds of this thread's loop, and for the lines that cause them.

        Args:
            tell: receives each hold, on the loop; None to report none.
            limit_s: limit in seconds of real time for a step of a rollout.
            end: called once, on another thread, while a rollout exceeds the limit.
        """
        previous, stop = self._tell, threading.Event()
        arguments = (threading.get_ident(), threading.get_native_id(), stop, limit_s, end)
        self._tell = tell
        self._waited_s = processor_wait_s(threading.get_native_id())
        threading.Thread(target=self._look, args=arguments, name="rlkit_holds", daemon=True).start()
        try:
            yield
        finally:
            self._tell = previous
            stop.set()

    def _look(
        self, thread: int, native_id: int, stop: threading.Event, limit_s: float, end: Callable[[Place], object]
    ) -> None:
        last_step: _Step | None = None
        while not stop.wait(_LOOK_S):
            step = self._step
            if step is None or step is not last_step:
                self._waited_s = processor_wait_s(native_id)
            last_step = step
            frame = None if step is None else _frames().get(thread)
            if step is None or frame is None:
                continue
            place = stack_place(frame)
            if self._step is step:  # still the same step, so the line belongs to it
                step.places = step.places or Counter[Place]()
                step.places[place] += 1
                if step.charged and time.monotonic() - step.began_s > limit_s:
                    end(place)
                    return
            del frame  # otherwise its locals would stay alive


def processor_wait_s(native_id: int) -> float:
    """Return the seconds that a thread waited for a processor; 0 if the system does not report it."""
    try:
        return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # not Linux, or built without it
        return 0.0


def _clock() -> float:
    return asyncio.get_running_loop().time()


_holds_by_loop = WeakKeyDictionary[asyncio.AbstractEventLoop, LoopHolds]()


def loop_holds() -> LoopHolds:
    """Return the holds of the running event loop."""
    loop = asyncio.get_running_loop()
    holds = _holds_by_loop.get(loop)
    if holds is None:
        holds = _holds_by_loop[loop] = LoopHolds()
    return holds


@contextmanager
def attribute_holds(env: str) -> Generator[None]:
    """Attribute holds in this context to an environment, but to no rollout."""
    try:
        holds = loop_holds()
    except RuntimeError:  # no running event loop, so nothing to hold
        yield
        return
    has_begun = holds.begin((), env)
    try:
        yield
    finally:
        if has_begun:
            holds.end()
