from __future__ import annotations

import asyncio
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from rlkit._util.stopwatch import Stopwatch, use_stopwatches
from rlkit.envs.openreward.admission import Gate, Limit
from rlkit.testing import run_virtual


@given(st.lists(st.sampled_from(["opened", "refused", "failed"]), max_size=60), st.integers(1, 64))
def test_the_limit_stays_between_one_and_its_maximum(events: list[str], maximum: int) -> None:
    limit = Limit(maximum)
    for now, event in enumerate(events):
        match event:
            case "opened":
                limit.opened()
            case "refused":
                limit.refused(maximum, float(now))
            case _:
                limit.failed()
        assert 1 <= limit.value <= maximum
        assert 0 < limit.pause_s(Random(now)) <= 30


def test_a_refusal_halves_the_limit_once_and_sessions_that_open_restore_it() -> None:
    limit = Limit(32)
    for _ in range(20):  # all of them were sent before the first came back
        limit.refused(32, now_s=10.0)
    assert limit.value == 16
    limit.refused(16, now_s=11.5)
    assert limit.value == 8
    opened = 0
    while limit.value < 32:
        limit.opened()
        opened += 1
    assert opened < 500


def test_pauses_grow_with_each_failure_in_a_row_and_differ() -> None:
    limit = Limit(4)
    longest = list[float]()
    for _ in range(10):
        limit.failed()
        longest.append(max(limit.pause_s(Random(seed)) for seed in range(50)))
    assert longest == sorted(longest)
    assert len({limit.pause_s(Random(seed)) for seed in range(10)}) == 10
    limit.opened()
    limit.failed()
    assert limit.pause_s(Random(0)) <= 0.5


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
