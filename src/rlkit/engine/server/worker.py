"""The thread that owns torch.

Invariant: jobs run one at a time, those that are to run soon before the others, and otherwise in the order in which
they were given; and between two of them, however many wait, running samples advance once the jobs have taken a slice of
time: by a token at least, and for as long as the jobs took, but no longer than a slice. A long job that calls
`give_way` between its parts lets samples begin and advance in the same way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
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
        self._given = threading.Condition()
        self._soon: deque[Callable[[], None]] = deque()
        self._jobs: deque[Callable[[], None]] = deque()
        self._busy = False
        self._since_s = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rlkit-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job. It answers for its own errors: one that it raises is only logged."""
        self._put(self._jobs, job)

    def submit_soon(self, job: Callable[[], None]) -> None:
        """Queue a short job that needs none of the others, such as the beginning of a sample."""
        self._put(self._soon, job)

    def stop(self) -> None:
        """End after the job that is running; samples that are not finished are left."""
        with self._given:
            self._stopping = True
            self._given.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def should_give_way(self) -> bool:
        """Whether the job that runs has taken a slice while others wait for one. May be read from any thread."""
        return (self._busy or bool(self._soon)) and self._clock() - self._since_s >= _SLICE_S

    def give_way(self) -> None:
        """Called by a job between two of its parts: run what is to run soon, and give samples a slice of time."""
        self._decode(_SLICE_S)
        self._since_s = self._clock()

    def _put(self, jobs: deque[Callable[[], None]], job: Callable[[], None]) -> None:
        with self._given:
            jobs.append(job)
            self._given.notify()

    def _next(self, wait_s: float | None) -> Callable[[], None] | None:
        with self._given:
            self._given.wait_for(lambda: self._soon or self._jobs or self._stopping, wait_s)
            if self._stopping:
                return None
            jobs = self._soon or self._jobs
            return jobs.popleft() if jobs else None

    def _decode(self, most_s: float) -> None:
        """Run what is to run soon, and advance running samples: by a token, and for `most_s`."""
        while self._soon and not self._stopping:
            _do(self._soon.popleft())
        until_s = self._clock() + most_s
        while not self._stopping:
            self._busy = self._advance()
            if not self._busy or self._clock() >= until_s:
                return

    def _run(self) -> None:
        together = True
        while not self._stopping:
            wait_s = 0.0 if self._busy else None
            jobs, began_s, taken_s = 0, 0.0, 0.0
            while taken_s < _SLICE_S and (job := self._next(wait_s)) is not None:
                self._since_s = self._clock()
                began_s = began_s if jobs else self._since_s
                _do(job)
                del job  # it holds a request, and whoever made that may be gone
                jobs += 1
                taken_s = self._clock() - began_s
                wait_s = 0.0 if self._busy or not together else _GATHER_S
            if jobs:
                together = jobs > 1
            self._decode(min(taken_s, _SLICE_S))


def _do(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:
        _log.exception("a job failed")
