from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlkit._util.threads import DaemonThreadPool, in_thread, run
from rlkit.store.journal import Journal, RecordKind
from rlkit.testing import run_virtual
from tests.limits import HANG_S


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


def test_blocked_threads_of_an_environment_do_not_block_the_journal(tmp_path: Path) -> None:
    async def main() -> None:
        with blocked_threads():
            journal = Journal(tmp_path, segment=1)
            journal.append(RecordKind.DRAW, b"{}")
            async with asyncio.timeout(HANG_S):
                await journal.sync()
                await journal.close()

    asyncio.run(main())


def test_work_in_a_thread_takes_no_virtual_time_and_is_waited_for() -> None:
    async def main() -> tuple[str, float]:
        asleep = asyncio.create_task(asyncio.sleep(3600))
        done = await in_thread(lambda seconds: time.sleep(seconds) or "done", 0.05)
        asleep.cancel()
        return done, asyncio.get_running_loop().time()

    assert run_virtual(main()) == ("done", 0.0)


def test_an_error_in_a_thread_is_raised_to_the_caller() -> None:
    with pytest.raises(ValueError, match="no"):
        asyncio.run(in_thread(int, "no"))


def test_submitted_work_is_done_for_any_queue_length() -> None:
    async def main() -> list[int]:
        return await asyncio.gather(*(asyncio.to_thread(lambda x: time.sleep(0.001) or x, x) for x in range(200)))

    assert run(main()) == list(range(200))


def test_running_work_is_finished_at_shutdown() -> None:
    done = list[int]()

    async def main() -> None:
        for number in range(100):
            asyncio.get_running_loop().run_in_executor(None, lambda x: time.sleep(0.01) or done.append(x), number)

    run(main())
    assert sorted(done) == list(range(100))


def test_endless_work_is_abandoned_and_queued_work_is_not_started() -> None:
    release, started = threading.Event(), list[int]()
    threads = DaemonThreadPool(grace_s=0.1)
    blocked = [threads.submit(release.wait) for _ in range(40)]  # more than there are threads
    behind = threads.submit(started.append, 1)
    threads.shutdown()
    assert behind.cancelled()
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(started.append, 2)
    release.set()
    assert all(future.cancelled() or future.result(HANG_S) for future in blocked)
    assert started == []


def test_an_error_of_blocking_work_is_raised_at_the_await() -> None:
    with pytest.raises(SystemExit, match="3"):
        run(asyncio.to_thread(sys.exit, 3))
    with pytest.raises(ValueError, match="no"):
        run(asyncio.to_thread(int, "no"))
