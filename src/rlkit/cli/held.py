"""Ending a command that a rollout holds up: a grader that never returns lets nothing else run, not even time limits.

Invariant: only a single piece of a rollout's own code that ran for longer than a whole rollout may is ended; what else
takes long, such as loading tasks, is left alone.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from rlkit.containment import plays

_LOOK_S = 0.2
"""How often it is looked at what runs."""


@contextmanager
def ended_if_held(limit_s: float, end: Callable[[str], object]) -> Generator[None]:
    """Inside, a rollout that holds up this event loop for too long is told, from a thread.

    Args:
        limit_s: that it may.
        end: given what there is to say; called once.
    """
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    done, beats = threading.Event(), [0]

    def beat() -> None:
        beats[0] += 1
        beating[0] = loop.call_later(_LOOK_S, beat)

    def look() -> None:
        held, since = None, time.monotonic()
        while not done.wait(_LOOK_S):
            task = asyncio.current_task(loop)
            # The same task without a beat in between has not let go.
            now = (id(task), beats[0]) if task is not None and plays(task) else None
            if now is None or now != held:
                held, since = now, time.monotonic()
            elif time.monotonic() - since > limit_s:
                end(f"a rollout held up everything else for more than {limit_s:g} s (timeout_s){_at(thread)}")
                return

    beating = [loop.call_later(_LOOK_S, beat)]
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        done.set()
        beating[0].cancel()


def _at(thread: int) -> str:
    """`, at file:line, in function`: where a thread is, in the user's code if it is in any."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]  documented, for debugging
    if frame is None:
        return ""
    places = traceback.extract_stack(frame)
    others = ("<", sys.base_prefix, sys.prefix, str(Path(__file__).parents[1]))
    own = [place for place in places if not place.filename.startswith(others)]
    last = (own or places)[-1]
    return f", at {last.filename}:{last.lineno}, in {last.name}"
