"""Threads of the engine: lanes that run whole tasks, teams that share one, and the barrier where a team waits.

Invariant: no result depends on how many threads there are.

Prompts and micro-batches run in lanes: two lanes of one thread each are faster than one computation spread over two
threads, because the small operations between the matrix products are shared out too, nothing waits at the end of every
product, and a lane that loses its core to another program does not hold up the other until the work is done. Decoding
steps, which take as long as reading the weights, are shared by a team (`rlkit.engine.kernels.decode_step`).
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
from numba.core import cgutils
from numba.extending import intrinsic

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
            self.raise_if_halted()
            return task()

        futures: list[Future[T]] = [self._pool.submit(begin, task) for task in tasks]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    def raise_if_halted(self) -> None:
        """Raise `StoppedError` once `halt` was called: a long task asks now and then."""
        if self._halted:
            raise StoppedError("the engine was stopped")

    def halt(self) -> None:
        """Let what runs end early. May be called from any thread."""
        self._halted = True

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


_THREADS_MAX = 4096


def parallel_for(
    task: Callable[[int, int], None], count: int, *, min_per_thread: int, threads: int | None = None
) -> None:
    """Call `task(first, last)` for ranges that cover 0 … `count`, on several threads if there is enough.

    Args:
        task: holds no lock while it computes; each range is its own.
        least: so many parts are worth a thread.
        threads: how many at most, by default as many as torch would use here.
    """
    threads = min(threads or torch.get_num_threads(), count // max(min_per_thread, 1))
    if threads < 2:
        task(0, count)
        return
    ranges = list(pairwise(count * i // threads for i in range(threads + 1)))
    run_team(lambda member: task(*ranges[member]), threads)


def run_team(task: Callable[[int], None], members: int, *, on_failure: Callable[[], None] | None = None) -> None:
    """Call `task(0)` … `task(members − 1)` at the same time, each on a thread of its own.

    Args:
        task: holds no lock while it computes.
        give_up: called when one cannot be begun or raises, so that none of the others waits for it.
    """

    turn, running, closed = Condition(), 0, False

    def run(member: int) -> None:
        nonlocal running
        with turn:
            if closed:
                return
            running += 1
        try:
            task(member)
        except BaseException:
            if on_failure is not None:
                on_failure()
            raise
        finally:
            with turn:
                running -= 1
                turn.notify_all()

    others: list[Future[None]] = []
    try:
        others.extend(_pool().submit(run, member) for member in range(1, members))
        task(0)
    except BaseException:
        # What could not be given a thread stays in the pool's queue all the same: it must not be begun any more.
        with turn:
            closed = True
        if on_failure is not None:
            on_failure()
        raise
    finally:
        wait(others)  # nothing goes on unseen
        with turn:
            turn.wait_for(lambda: not running)
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    # More than one team may be at work, and those of one wait for each other: each thread of a team must be running.
    return ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="rlkit-engine-team")


os.register_at_fork(after_in_child=_pool.cache_clear)


OPEN_BARRIER = 1 << 60
"""What the counter is set to so that everybody passes at all later meetings."""

# About a tenth of a millisecond: a thread that takes so long to come has lost its core.
_SPINS = 2000
_RELAX = {"x86_64": ("llvm.x86.sse2.pause",), "aarch64": ("llvm.aarch64.hint", 1), "arm64": ("llvm.aarch64.hint", 1)}
_WORD = ir.IntType(64)


@intrinsic
def _add(_context: Any, _address: Any, _value: Any) -> Any:
    def emit(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.intp(types.intp, types.intp), emit


@intrinsic
def _read(_context: Any, _address: Any) -> Any:
    def emit(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _WORD.as_pointer()), "seq_cst", 8)

    return types.intp(types.intp), emit


@intrinsic
def _relax(_context: Any) -> Any:
    """Tell the processor that nothing is gained by running ahead."""

    def emit(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if platform.machine() in _RELAX:
            name, *hints = _RELAX[platform.machine()]
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(hints))
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [ir.IntType(32)(h) for h in hints])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _leave_core(_context: Any) -> Any:
    """Let another thread run here, if there is one."""

    def emit(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        give_way = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield")
        builder.call(give_way, [])
        return context.get_dummy_value()

    return types.void(), emit


@njit(nogil=True)
def wait_at_barrier(counter: int, expected: int) -> None:
    """Count oneself, and wait until `expected` have been counted since the counter was 0.

    What each wrote before is seen by all afterwards.

    Args:
        counter: the address of an aligned int64.
        expected: as many as take part, times the meetings so far with this one.
    """
    if _add(counter, 1) >= expected - 1:
        return
    spins = 0
    while _read(counter) < expected:
        spins += 1
        if spins < _SPINS:
            _relax()
        else:
            _leave_core()
