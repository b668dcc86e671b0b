"""Sharing compiled work among threads.

Invariant: what is computed does not depend on how many threads share it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from threading import Condition

import torch

_THREADS_MAX = 4096


def share(task: Callable[[int, int], None], count: int, *, least: int, threads: int | None = None) -> None:
    """Call `task(first, last)` for ranges that cover 0 … `count`, on several threads if there is enough.

    Args:
        task: holds no lock while it computes; each range is its own.
        least: so many parts are worth a thread.
        threads: how many at most, by default as many as torch would use here.
    """
    threads = min(threads or torch.get_num_threads(), count // max(least, 1))
    if threads < 2:
        task(0, count)
        return
    ranges = list(pairwise(count * i // threads for i in range(threads + 1)))
    together(lambda member: task(*ranges[member]), threads)


def together(task: Callable[[int], None], members: int, *, give_up: Callable[[], None] | None = None) -> None:
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
            if give_up is not None:
                give_up()
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
        if give_up is not None:
            give_up()
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
