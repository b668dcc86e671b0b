"""Worker: the thread that runs torch.

Invariant: jobs run one at a time, urgent jobs first, and otherwise in the order of submission. When jobs have taken a
slice of time, running samples advance before the next job, however many jobs wait. They advance by at least one token,
for as long as the jobs took, but no longer than a slice. A long job that calls `let_others_run` between its parts lets
samples start and advance in the same way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)

# Concurrent requests of a client arrive slightly apart, and one batch is faster than two. The worker waits for more
# requests only if the last ones came together, because waiting would delay a client that sends one at a time.
_GATHER_S = 0.004
# Time for several tokens of a small model. Shorter slices would starve decoding during training, longer ones delay
# requests.
_SLICE_S = 0.25


class Worker:
    """Thread that runs jobs and decodes samples.

    Args:
        advance: decodes one token of every running sample, and returns True while there is more to decode.
        clock: seconds from any start.
    """

    def __init__(self, advance: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._advance = advance
        self._clock = clock
        self._changed = threading.Condition()
        self._urgent: deque[Callable[[], None]] = deque()
        self._jobs: deque[Callable[[], None]] = deque()
        self._busy = False
        self._slice_start_s = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rlkit-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Callable[[], None], *, urgent: bool = False) -> None:
        """Queue a job, which must handle its own errors: an exception is only logged.

        Args:
            urgent: True for a short job that does not depend on other jobs, such as the start of a sample.
        """
        with self._changed:
            (self._urgent if urgent else self._jobs).append(job)
            self._changed.notify()

    def stop(self) -> None:
        """Stop after the running job; unfinished samples are dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def should_yield(self) -> bool:
        """True when the running job has taken a slice while other work waits. May be read from any thread."""
        return (self._busy or bool(self._urgent)) and self._clock() - self._slice_start_s >= _SLICE_S

    def let_others_run(self) -> None:
        """Run urgent jobs, and decode samples for a slice of time; called by a job between its parts."""
        self._decode(_SLICE_S)
        self._slice_start_s = self._clock()

    def _next(self, wait_s: float | None) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._urgent or self._jobs or self._stopping, wait_s)
            if self._stopping:
                return None
            jobs = self._urgent or self._jobs
            return jobs.popleft() if jobs else None

    def _decode(self, duration_s: float) -> None:
        """Run urgent jobs, then advance running samples by at least a token, until `duration_s` is over."""
        while self._urgent and not self._stopping:
            _run_job(self._urgent.popleft())
        end_s = self._clock() + duration_s
        while not self._stopping:
            self._busy = self._advance()
            if not self._busy or self._clock() >= end_s:
                return

    def _run(self) -> None:
        came_together = True
        while not self._stopping:
            wait_s = 0.0 if self._busy else None
            job_count, start_s, elapsed_s = 0, 0.0, 0.0
            while elapsed_s < _SLICE_S and (job := self._next(wait_s)) is not None:
                self._slice_start_s = self._clock()
                start_s = start_s if job_count else self._slice_start_s
                _run_job(job)
                del job  # it holds a reference to a request, whose client may be gone
                job_count += 1
                elapsed_s = self._clock() - start_s
                wait_s = 0.0 if self._busy or not came_together else _GATHER_S
            if job_count:
                came_together = job_count > 1
            self._decode(min(elapsed_s, _SLICE_S))


def _run_job(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:
        _log.exception("a job failed")
