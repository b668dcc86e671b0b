from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlkit.concurrency import in_thread
from rlkit.store.journal import Journal, Kind
from rlkit.testing import run_virtual


@contextmanager
def blocked_threads() -> Generator[None]:
    """Every thread of the event loop is held, as by graders without a time limit."""
    release = threading.Event()
    executor = ThreadPoolExecutor(1)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(executor)
    loop.run_in_executor(None, release.wait)
    try:
        yield
    finally:
        release.set()


def test_what_an_environment_keeps_busy_does_not_hold_up_the_journal(tmp_path: Path) -> None:
    async def run() -> None:
        with blocked_threads():
            journal = Journal(tmp_path, segment=1)
            journal.append(Kind.DRAW, b"{}")
            async with asyncio.timeout(10):
                await journal.sync()
                await journal.close()

    asyncio.run(run())


def test_work_in_a_thread_takes_no_virtual_time_and_is_waited_for() -> None:
    async def run() -> tuple[str, float]:
        asleep = asyncio.create_task(asyncio.sleep(3600))
        done = await in_thread(lambda seconds: time.sleep(seconds) or "done", 0.05)
        asleep.cancel()
        return done, asyncio.get_running_loop().time()

    assert run_virtual(run()) == ("done", 0.0)


def test_what_the_work_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="no"):
        asyncio.run(in_thread(int, "no"))
