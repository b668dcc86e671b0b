"""Sharing compiled work among threads.

Invariant: what is computed does not depend on how many threads share it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise

import torch

_THREADS_MAX = 64


def share(task: Callable[[int, int], None], count: int, *, least: int) -> None:
    """Call `task(first, last)` for ranges that cover 0 … `count`, on as many threads as torch would use here.

    Args:
        task: holds no lock while it computes; each range is its own.
        count: how many parts the work has.
        least: so many parts are worth a thread.
    """
    threads = min(torch.get_num_threads(), count // max(least, 1))
    if threads < 2:
        task(0, count)
        return
    edges = [count * i // threads for i in range(threads + 1)]
    others = [_pool().submit(task, first, last) for first, last in pairwise(edges[1:])]
    try:
        task(edges[0], edges[1])
    finally:
        wait(others)  # nothing goes on unseen
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    # What runs here waits for nobody, so that the lanes can share it. A thread is begun when none is idle.
    return ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="rlkit-engine-team")


os.register_at_fork(after_in_child=_pool.cache_clear)
