"""The thread that owns torch.

Invariant: jobs run one at a time, in the order in which they were given; and between two of them, however many wait,
running samples advance once the jobs have taken a slice of time: by a token at least, and for as long as the jobs took,
but no longer than a slice.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

# Requests that a client sends together arrive a little apart; one batch of them is faster than two. Only a client whose
# last requests came together is waited for: one that asks a thing at a time gains nothing by it.
_GATHER_S = 0.004
# Some tokens of a small model. Shorter ones would hardly decode beside training, longer ones would hold up requests.
_SLICE_S = 0.25


class Worker:
    """Runs jobs on a thread of its own.

    Args:
        advance: decodes one token of everything that is being sampled, and says whether there is more.
        clock: seconds from any start.
    """

    def __init__(self, advance: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._advance = advance
        self._clock = clock
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rlkit-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job. It answers for its own errors: one that it raises is only logged."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End after the job that is running; samples that are not finished are left."""
        self._stopping = True
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        busy, together = False, True
        while not self._stopping:
            wait_s = 0.0 if busy else None
            jobs, began_s, taken_s = 0, 0.0, 0.0
            while taken_s < _SLICE_S:
                try:
                    job = self._jobs.get(block=wait_s != 0.0, timeout=wait_s)
                except queue.Empty:
                    break
                if job is None or self._stopping:
                    return
                if not jobs:
                    began_s = self._clock()
                try:
                    job()
                except Exception:
                    _log.exception("a job failed")
                del job  # it holds a request, and whoever made that may be gone
                jobs += 1
                taken_s = self._clock() - began_s
                wait_s = 0.0 if busy or not together else _GATHER_S
            if jobs:
                together = jobs > 1
            until_s = self._clock() + min(taken_s, _SLICE_S)
            busy = self._advance()
            while busy and not self._stopping and self._clock() < until_s:
                busy = self._advance()
