"""What rollouts leave behind: tasks, threads, open files and child processes.

Invariant: only what grows with every rollout is a leftover. Pools, caches and shared connections settle, and are not.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from rlkit.check.exam import CLOSELY, Exam, Problems
from rlkit.check.play import name_of
from rlkit.check.replies import PLAIN
from rlkit.check.report import Finding

ROUNDS = 3
"""What grows in each of so many rounds is not freed."""

SETTLE_S = 0.3
"""How long a finished rollout may take to let go of what it used."""

SETTLE_POLL_S = 0.02


async def clean_up(exam: Exam) -> Finding:
    """Whether a rollout frees what it used."""
    problems = Problems("clean-up", "close what a rollout opens in a `finally`, and wait for the tasks that it starts")
    for env, reply in exam.cases(exam.envs[:CLOSELY], exam.replies):
        grown = await _grown(lambda env=env, reply=reply: exam.player.play(env, reply))
        problems.lines += [f"{name_of(env)}: each rollout leaves {what}" for what in grown]
        if grown:
            break
    return problems.finding(f"a rollout leaves none of: {', '.join(_held())}")


async def cancellation(exam: Exam) -> Finding:
    """Whether a cancelled rollout ends, and frees what it used."""
    problems = Problems("cancellation", "let CancelledError pass, and close what a rollout holds in a `finally`")
    tried = 0
    waits = [(env, PLAIN, 0) for env in exam.envs[:CLOSELY]] + [(env, reply, 1) for env, reply in exam.long[:CLOSELY]]
    for env, reply, turn in waits:
        wrong = await exam.player.cancel(env, reply, turn=turn)
        if wrong is None:
            continue
        tried += 1
        grown = await _grown(lambda env=env, reply=reply, turn=turn: exam.player.cancel(env, reply, turn=turn))
        problems.lines += [wrong] if wrong else []
        problems.lines += [f"{name_of(env)}: each cancelled rollout leaves {what}" for what in grown]
    if not tried:
        return problems.skipped("no rollout asked the policy for anything")
    return problems.finding("a cancelled rollout ends at once and leaves nothing behind")


async def _grown(play: Callable[[], Awaitable[object]]) -> list[str]:
    await play()
    held, grown = _held(), set(_held())
    for _ in range(ROUNDS):
        await play()
        now = await _settled(held)
        grown = {what for what in grown if now[what] > held[what]}
        held = now
        if not grown:
            break
    return sorted(grown)


async def _settled(before: Mapping[str, int]) -> Mapping[str, int]:
    deadline_s = time.monotonic() + SETTLE_S
    gc.collect()
    while time.monotonic() < deadline_s:
        now = _held()
        if all(count <= before[what] for what, count in now.items()):
            return now
        await asyncio.sleep(SETTLE_POLL_S)
    return _held()


def _held() -> dict[str, int]:
    held = {"a pending task": len(asyncio.all_tasks()), "a thread": threading.active_count()}
    files = next((path for path in (Path("/proc/self/fd"), Path("/dev/fd")) if path.exists()), None)
    if files:
        held["an open file"] = len(list(files.iterdir()))
    children = list(Path("/proc/self/task").glob("*/children"))
    if children:
        held["a child process"] = sum(len(path.read_text().split()) for path in children)
    return held
