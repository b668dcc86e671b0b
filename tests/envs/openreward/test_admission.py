from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from hypothesis import given
from hypothesis import strategies as st

from rlkit._util.stopwatch import Stopwatch, use_stopwatches
from rlkit.envs.openreward.admission import Gate
from rlkit.testing import run_virtual


async def measure_pause(gate: Gate) -> float:
    start_s = asyncio.get_running_loop().time()
    await gate.pause()
    return asyncio.get_running_loop().time() - start_s


@given(st.lists(st.sampled_from(["opened", "refused", "failed"]), max_size=60), st.integers(1, 64))
def test_the_limit_stays_between_one_and_its_maximum(events: list[str], maximum: int) -> None:
    async def main() -> None:
        gate = Gate(maximum)
        for event in events:
            getattr(gate, event)()
            assert 1 <= gate.limit <= maximum
            assert (await measure_pause(gate) > 0) == (event != "opened")

    run_virtual(main())


def test_a_refusal_halves_the_limit_once_and_sessions_that_open_restore_it() -> None:
    async def main() -> None:
        gate = Gate(32)
        async with AsyncExitStack() as sessions:
            for _ in range(31):
                await sessions.enter_async_context(gate.admitted())
            for _ in range(20):  # all of them were sent before the first came back
                gate.refused()
            assert gate.limit == 16
            await asyncio.sleep(1.5)
            gate.refused()
            assert gate.limit == 8
        opened = 0
        while gate.limit < 32:
            gate.opened()
            opened += 1
        assert opened < 500

    run_virtual(main())


def test_pauses_grow_with_each_failure_in_a_row_and_differ() -> None:
    async def main() -> None:
        gate = Gate(4)
        for failures in range(1, 11):
            gate.failed()
            pauses = [await measure_pause(gate) for _ in range(10)]
            longest = min(30, 0.5 * 2 ** (failures - 1))
            assert all(longest / 2 <= pause <= longest + 0.01 for pause in pauses)
            assert len(set(pauses)) == 10
        gate.opened()
        gate.failed()
        assert await measure_pause(gate) <= 0.51

    run_virtual(main())


def test_no_more_are_admitted_than_the_limit_says_and_a_cancelled_one_takes_no_place() -> None:
    async def main() -> None:
        gate = Gate(3)
        max_active = 0

        async def hold(seconds: float) -> None:
            nonlocal max_active
            async with gate.admitted():
                max_active = max(max_active, gate.active)
                await asyncio.sleep(seconds)

        tasks = [asyncio.create_task(hold(1 + number % 3)) for number in range(12)]
        await asyncio.sleep(0.5)
        for task in tasks[::4]:
            task.cancel()
        await asyncio.wait(tasks)
        assert (max_active, gate.active) == (3, 0)

    run_virtual(main())


def test_waiting_to_be_admitted_is_not_the_rollouts_own_time() -> None:
    async def main() -> float:
        gate = Gate(1)
        stopwatch = Stopwatch()

        async def rollout() -> None:
            with use_stopwatches([stopwatch]):
                async with gate.admitted():
                    await asyncio.sleep(2)

        async with gate.admitted():
            playing = asyncio.create_task(rollout())
            await asyncio.sleep(100)
        await playing
        return stopwatch.played_s

    assert run_virtual(main()) < 3
