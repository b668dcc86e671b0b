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


def test_what_an_environment_keeps_busy_does_not_hold_up_the_journal(tmp_path: Path) -> None:
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


def test_what_the_work_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="no"):
        asyncio.run(in_thread(int, "no"))


def test_what_is_asked_of_threads_is_done_however_many_wait() -> None:
    async def main() -> list[int]:
        return await asyncio.gather(*(asyncio.to_thread(lambda x: time.sleep(0.001) or x, x) for x in range(200)))

    assert run(main()) == list(range(200))


def test_what_is_under_way_at_the_end_is_finished() -> None:
    done = list[int]()

    async def main() -> None:
        for number in range(100):
            asyncio.get_running_loop().run_in_executor(None, lambda x: time.sleep(0.01) or done.append(x), number)

    run(main())
    assert sorted(done) == list(range(100))


def test_what_never_ends_is_abandoned_and_what_waits_behind_it_does_not_begin() -> None:
    release, begun = threading.Event(), list[int]()
    threads = DaemonThreadPool(grace_s=0.1)
    blocked = [threads.submit(release.wait) for _ in range(40)]  # more than there are threads
    behind = threads.submit(begun.append, 1)
    threads.shutdown()
    assert behind.cancelled()
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(begun.append, 2)
    release.set()
    assert all(one.cancelled() or one.result(HANG_S) for one in blocked)
    assert begun == []


def test_what_blocks_in_a_thread_raises_where_it_is_awaited() -> None:
    with pytest.raises(SystemExit, match="3"):
        run(asyncio.to_thread(sys.exit, 3))
    with pytest.raises(ValueError, match="no"):
        run(asyncio.to_thread(int, "no"))
