"""Threads of the engine: lanes that run whole tasks, teams that share one task, and the barrier of a team.

Invariant: no result depends on the number of threads.

Prompts and micro-batches run in lanes. Two lanes of one thread each are faster than one computation on two threads:

- The small operations between the matrix products also run in parallel.
- No thread waits at the end of every product.
- A lane that loses its core to another program does not delay the other lane.

A decoding step takes as long as reading the weights, so a team shares it (`rlkit.engine.kernels.decode_step`).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportCallIssue=false
# (numba and llvmlite bring no types, and an intrinsic is called without its first argument)

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from threading import Condition
from typing import Any

import torch
from llvmlite import ir
from numba import njit, types

from rlkit.engine.kernels.llvm import INDEX, WORD, Emitter, make_intrinsic
from rlkit.errors import RlkitError

_CORES = torch.get_num_threads()
_LANES_MAX = 2


class StoppedError(RlkitError):
    """The engine was stopped while a task was running."""


class Lanes:
    """A fixed number of threads that run torch.

    Args:
        threads: total number of cores of all lanes; by default all of the machine.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.cores = cores = threads or _CORES
        self._halted = False
        self.count = min(cores, _LANES_MAX)
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="rlkit-engine-lane")

    def run[T](self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run tasks, one at a time on each lane, and return their results; tasks fewer than lanes share all cores.

        If a task raises an error, it is raised after all other tasks have ended.
        """
        threads = self.cores // max(min(len(tasks), self.count), 1)

        def run_task(task: Callable[[], T]) -> T:
            self.raise_if_halted()
            torch.set_num_threads(threads)
            return task()

        futures: list[Future[T]] = [self._pool.submit(run_task, task) for task in tasks]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    def raise_if_halted(self) -> None:
        """Raise `StoppedError` after a call of `halt`; long tasks call this method regularly."""
        if self._halted:
            raise StoppedError("the engine was stopped")

    def halt(self) -> None:
        """Let running tasks end early. May be called from any thread."""
        self._halted = True

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


_THREADS_MAX = 4096


def parallel_for(
    task: Callable[[int, int], None], count: int, *, min_per_thread: int, threads: int | None = None
) -> None:
    """Call `task(first, last)` for ranges that cover 0 … `count`, on several threads if there are enough items.

    Args:
        task: function that releases the interpreter's lock while it computes; ranges do not overlap.
        min_per_thread: minimum number of items per thread.
        threads: maximum number of threads; by default the number that torch uses on this thread.
    """
    threads = min(threads or torch.get_num_threads(), count // max(min_per_thread, 1))
    if threads < 2:
        task(0, count)
        return
    ranges = list(pairwise(count * i // threads for i in range(threads + 1)))
    run_team(lambda member: task(*ranges[member]), threads)


def run_team(task: Callable[[int], None], members: int, *, on_failure: Callable[[], None] | None = None) -> None:
    """Call `task(0)` … `task(members − 1)` concurrently, each on its own thread.

    Args:
        task: function that releases the interpreter's lock while it computes.
        on_failure: called if a member cannot start or raises an error, so that the others do not wait for it.
    """

    changed, running, is_closed = Condition(), 0, False

    def run(member: int) -> None:
        nonlocal running
        with changed:
            if is_closed:
                return
            running += 1
        try:
            task(member)
        except BaseException:
            if on_failure is not None:
                on_failure()
            raise
        finally:
            with changed:
                running -= 1
                changed.notify_all()

    others: list[Future[None]] = []
    try:
        others.extend(_pool().submit(run, member) for member in range(1, members))
        task(0)
    except BaseException:
        # A task without a thread stays in the pool's queue, but must not start later.
        with changed:
            is_closed = True
        if on_failure is not None:
            on_failure()
        raise
    finally:
        wait(others)
        with changed:
            changed.wait_for(lambda: not running)
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    # Several teams may run, and the members of a team wait for each other, so every member needs a thread.
    return ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="rlkit-engine-team")


os.register_at_fork(after_in_child=_pool.cache_clear)


OPEN_BARRIER = 1 << 60
"""Value of a barrier's counter that releases all waiting threads."""

# About a tenth of a millisecond; a thread that arrives later has probably lost its core.
_SPINS = 2000
_RELAX = {"x86_64": ("llvm.x86.sse2.pause",), "aarch64": ("llvm.aarch64.hint", 1), "arm64": ("llvm.aarch64.hint", 1)}


@make_intrinsic(types.intp(types.intp, types.intp))
def _atomic_add(e: Emitter, address: Any, value: Any) -> Any:
    return e.builder.atomic_rmw("add", e.builder.inttoptr(address, INDEX.as_pointer()), value, "seq_cst")


@make_intrinsic(types.intp(types.intp))
def _atomic_load(e: Emitter, address: Any) -> Any:
    return e.builder.load_atomic(e.builder.inttoptr(address, INDEX.as_pointer()), "seq_cst", 8)


@make_intrinsic(types.void())
def _pause(e: Emitter) -> None:
    """Emit the processor's instruction for spin loops."""
    if platform.machine() in _RELAX:
        name, *hints = _RELAX[platform.machine()]
        e.call(name, ir.VoidType(), *map(WORD, hints))


@make_intrinsic(types.void())
def _yield_core(e: Emitter) -> None:
    """Emit a call that lets another thread run on this core."""
    e.call("sched_yield", WORD)


@njit(nogil=True)
def wait_at_barrier(counter: int, expected: int) -> int:
    """Wait until `expected` threads have arrived since the counter was 0, and return `expected`.

    The writes of each thread are then visible to all.

    Threads meet more than a hundred times in a decoding step, too often to sleep and be woken. They spin, and after a
    time yield their core.

    Args:
        counter: address of an aligned int64.
        expected: number of threads times the number of barriers so far, including this barrier.
    """
    if _atomic_add(counter, 1) >= expected - 1:
        return expected
    spins = 0
    while _atomic_load(counter) < expected:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _yield_core()
    return expected
