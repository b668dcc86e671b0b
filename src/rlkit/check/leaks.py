"""Resource leaks of rollouts: tasks, threads, open files and child processes.

Invariant: a resource leaks if its count grows with every rollout; pools, caches and shared connections do not leak.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

ROUNDS = 3
"""Number of consecutive rounds in which a leak must grow."""

SETTLE_POLLS, SETTLE_POLL_S = 15, 0.02
"""Number of polls, and seconds between them, for a finished rollout to release its resources."""

OPEN_FILES = Path("/dev/fd")  # folder of the open files of this process, on Linux and macOS


async def find_leaks(play: Callable[[], Awaitable[object]]) -> list[str]:
    """Return the kinds of resources that each call of `play` leaks, as phrases."""
    await play()
    before = count_resources()
    leaks = set(before)
    for _ in range(ROUNDS):
        await play()
        after = await _settle(before)
        leaks = {kind for kind in leaks if after[kind] > before[kind]}
        before = after
        if not leaks:
            break
    return sorted(leaks)


async def _settle(before: Mapping[str, int]) -> Mapping[str, int]:
    """Wait for some time until no count exceeds `before`; return the counts."""
    gc.collect()
    for _ in range(SETTLE_POLLS):
        counts = count_resources()
        if all(count <= before[kind] for kind, count in counts.items()):
            return counts
        await asyncio.sleep(SETTLE_POLL_S)
    return count_resources()


def count_resources() -> dict[str, int]:
    """Count the resources of this process, by phrases such as "an open file"."""
    counts = {"a pending task": len(asyncio.all_tasks()), "a thread": threading.active_count()}
    if OPEN_FILES.exists():
        counts["an open file"] = len(list(OPEN_FILES.iterdir()))
    if children := list(Path("/proc/self/task").glob("*/children")):
        counts["a child process"] = sum(len(path.read_text().split()) for path in children)
    return counts
