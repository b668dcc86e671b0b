"""Threads for blocking calls of sandboxes.

Invariant: the threads are separate from the journal's and the event loop's, so sandboxes delay only sandboxes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import cache

from rlkit._util.threads import DaemonThreadPool

_COUNT = 32


async def in_thread[*Ts, T](function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Call a blocking function in a thread, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), function, *arguments)


@cache
def _threads() -> DaemonThreadPool:
    return DaemonThreadPool(_COUNT, name="rlkit-sandbox")


os.register_at_fork(after_in_child=_threads.cache_clear)
