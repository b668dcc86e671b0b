from __future__ import annotations

import asyncio

from rlkit.rollout.task_guard import register_cleanup, stop_leftover_tasks


def test_what_cleans_up_behind_a_rollout_is_waited_for_at_the_end_of_the_run() -> None:
    done = list[str]()

    async def clean() -> None:
        await asyncio.sleep(0.05)
        done.append("cleaned")

    @stop_leftover_tasks()
    async def run() -> None:
        assert register_cleanup(asyncio.create_task(clean()))
        done.append("rollout over")

    asyncio.run(run())
    assert done == ["rollout over", "cleaned"]


def test_a_run_that_is_cancelled_still_waits_for_what_cleans_up() -> None:
    done = list[str]()

    async def clean() -> None:
        await asyncio.sleep(0.05)
        done.append("cleaned")

    @stop_leftover_tasks()
    async def run() -> None:
        register_cleanup(asyncio.create_task(clean()))
        await asyncio.sleep(60)

    async def main() -> None:
        running = asyncio.create_task(run())
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    assert done == ["cleaned"]


def test_without_a_run_nobody_waits_for_what_cleans_up() -> None:
    async def main() -> None:
        task = asyncio.create_task(asyncio.sleep(0))
        assert not register_cleanup(task)
        await task

    asyncio.run(main())
