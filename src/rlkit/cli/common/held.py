"""Ending a command that a rollout holds up: a grader that never returns lets nothing else run, not even time limits.

Invariant: only a single piece of a rollout's own code that ran for longer than a whole rollout may is ended; what else
takes long, such as loading tasks, is left alone.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlkit.rollout.task_guard import plays

_LOOK_S = 0.2
"""How often it is looked at what runs."""


@contextmanager
def ended_if_held(limit_s: float, end: Callable[[str], object]) -> Generator[None]:
    """Inside, a rollout that holds up this event loop for too long is told.

    It is looked for from a thread. Code that lets no other thread run, such as a regular expression that backtracks for
    ever, is found by a signal after each piece of processor time, so this must be entered in the main thread.

    Args:
        limit_s: that it may.
        end: given what there is to say, from either; called once.
    """
    watch = _Watch(asyncio.get_running_loop(), threading.get_ident(), limit_s, end)
    done = threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_S):
            watch.look()

    def beat() -> None:
        watch.beats += 1
        beating[0] = watch.loop.call_later(_LOOK_S, beat)

    beating = [watch.loop.call_later(_LOOK_S, beat)]
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    before = signal.signal(signal.SIGVTALRM, lambda number, frame: watch.look())
    signal.setitimer(signal.ITIMER_VIRTUAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        done.set()
        beating[0].cancel()


@dataclass(slots=True, eq=False)
class _Watch:
    """What runs on an event loop, and since when.

    Args:
        loop: it runs on this.
        thread: in which the loop runs.
        limit_s: that a rollout may run without letting go.
        end: told of one that does not.
        beats: how often the loop came to do something else.
    """

    loop: asyncio.AbstractEventLoop
    thread: int
    limit_s: float
    end: Callable[[str], object]
    beats: int = 0
    _held: tuple[int, int] | None = None
    _since_s: float = 0.0
    _told: bool = False

    def look(self) -> None:
        """Look once."""
        task = asyncio.current_task(self.loop)
        # The same task without a beat in between has not let go.
        now = (id(task), self.beats) if task is not None and plays(task) else None
        if now is None or now != self._held:
            self._held, self._since_s = now, time.monotonic()
        elif time.monotonic() - self._since_s > self.limit_s and not self._told:
            self._told = True
            held_s = f"{self.limit_s:g} s (timeout_s)"
            try:
                self.end(f"a rollout held up everything else for more than {held_s}{_at(self.thread)}")
            except RuntimeError:  # the signal came in the middle of a write to the same stream: the thread will tell
                self._told = False


def _at(thread: int) -> str:
    """`, at file:line, in function`: where a thread is, in the user's code if it is in any."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]  documented, for debugging
    if frame is None:
        return ""
    places = traceback.extract_stack(frame)
    others = ("<", sys.base_prefix, sys.prefix, str(Path(__file__).parents[2]))
    own = [place for place in places if not place.filename.startswith(others)]
    last = (own or places)[-1]
    return f", at {last.filename}:{last.lineno}, in {last.name}"
