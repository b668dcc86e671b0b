"""Threads that compute side by side, each on rows of its own.

Invariant: what a lane computes never depends on how many lanes there are or how many threads each has; after `halt`
nothing more is begun.

What they run are prompts and micro-batches: two lanes of one thread each are faster than one computation spread over
two threads, because the small operations between the matrix products are shared out too, nothing waits at the end of
every product, and a lane that loses its core to another program does not hold up the other until the work is done.
Decoding steps, which take as long as reading the weights, share them instead (`rlkit.engine.kernels.decode_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from rlkit.errors import RlkitError

_CORES = torch.get_num_threads()
_LANES_MAX = 2


class StoppedError(RlkitError):
    """The engine stops, and what was being computed is not wanted any more."""


class Lanes:
    """A fixed number of threads that run torch.

    Args:
        threads: how many cores to use, by default all of them; so many are the `cores` of all lanes together.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.cores = cores = threads or _CORES
        self._halted = False
        self.count = min(cores, _LANES_MAX)
        per_lane = max(cores // self.count, 1)
        self._pool = ThreadPoolExecutor(
            self.count, thread_name_prefix="rlkit-engine-lane", initializer=torch.set_num_threads, initargs=(per_lane,)
        )

    def run[T](self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run the tasks, as many at a time as there are lanes, and return what they return.

        When one raises, the others still end before the error is passed on, so that nothing goes on unseen.
        """

        def begin(task: Callable[[], T]) -> T:
            self.check()
            return task()

        futures: list[Future[T]] = [self._pool.submit(begin, task) for task in tasks]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    def check(self) -> None:
        """Raise `StoppedError` once `halt` was called: a long task asks now and then."""
        if self._halted:
            raise StoppedError("the engine was stopped")

    def halt(self) -> None:
        """Let what runs end early. May be called from any thread."""
        self._halted = True

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
