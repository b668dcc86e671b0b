"""Resources that rollouts leave behind: tasks, threads, open files and child processes.

Invariant: only what grows with every rollout is a leftover. Pools, caches and shared connections settle, and are not.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

ROUNDS = 3
"""What grows in each of so many rounds is not freed."""

SETTLE_S = 0.3
"""How long a finished rollout may take to let go of what it used."""

SETTLE_POLL_S = 0.02


async def find_leaks(play: Callable[[], Awaitable[object]]) -> list[str]:
    """Return the kinds of resources that each play leaves behind, as phrases."""
    await play()
    held = count_resources()
    grown = set(held)
    for _ in range(ROUNDS):
        await play()
        now = await _settle(held)
        grown = {kind for kind in grown if now[kind] > held[kind]}
        held = now
        if not grown:
            break
    return sorted(grown)


async def _settle(before: Mapping[str, int]) -> Mapping[str, int]:
    """Wait until nothing is held but what was before, for a short time; return what is held then."""
    deadline_s = time.monotonic() + SETTLE_S
    gc.collect()
    while True:
        held = count_resources()
        if all(count <= before[kind] for kind, count in held.items()) or time.monotonic() >= deadline_s:
            return held
        await asyncio.sleep(SETTLE_POLL_S)


def count_resources() -> dict[str, int]:
    """Count the resources of this process, by phrases such as "an open file"."""
    held = {"a pending task": len(asyncio.all_tasks()), "a thread": threading.active_count()}
    files = next((path for path in (Path("/proc/self/fd"), Path("/dev/fd")) if path.exists()), None)
    if files:
        held["an open file"] = len(list(files.iterdir()))
    children = list(Path("/proc/self/task").glob("*/children"))
    if children:
        held["a child process"] = sum(len(path.read_text().split()) for path in children)
    return held
