from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit._util.priority_semaphore import Slots, SlotsClosed
from rlkit.testing import run_virtual


@asynccontextmanager
async def held(slots: Slots, rank: int) -> AsyncGenerator[None]:
    """Hold a slot."""
    await slots.acquire((rank,))
    try:
        yield
    finally:
        slots.release()


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 9)), max_size=20))
def test_no_more_than_allowed_hold_a_slot_and_every_slot_comes_back(
    count: int, visits: list[tuple[int, int, int]]
) -> None:
    live = most = 0

    async def visit(slots: Slots, arrival: int, rank: int, stay: int, patience: float) -> None:
        nonlocal live, most
        await asyncio.sleep(arrival)
        async with asyncio.timeout(patience), held(slots, rank):
            live += 1
            most = max(most, live)
            try:
                await asyncio.sleep(stay)
            finally:
                live -= 1

    async def run() -> None:
        slots = Slots(count)
        going = [visit(slots, *one, 3.5 if index % 3 == 0 else 1e6) for index, one in enumerate(visits)]
        await asyncio.gather(*going, return_exceptions=True)
        for _ in range(count):  # all are free again
            await asyncio.wait_for(slots.acquire((0,)), 1)

    run_virtual(run())
    assert most <= count


def test_the_lowest_rank_is_next_and_equals_in_the_order_in_which_they_came() -> None:
    served = list[str]()

    async def visit(slots: Slots, rank: int, name: str) -> None:
        async with held(slots, rank):
            served.append(name)
            await asyncio.sleep(1)

    async def run() -> None:
        slots = Slots(1)
        await asyncio.gather(*(visit(slots, rank, name) for rank, name in ((5, "a"), (3, "b"), (1, "c"), (3, "d"))))

    run_virtual(run())
    assert served == ["a", "c", "b", "d"]


def test_slots_that_close_refuse_those_who_wait_and_all_who_come_later() -> None:
    reasons = list[str]()

    async def run() -> None:
        reason: str | None = None
        slots = Slots(1, closed=lambda: reason, on_close=reasons.append)
        await slots.acquire((0,))
        waiting = [asyncio.create_task(slots.acquire((rank,))) for rank in (1, 2)]
        await asyncio.sleep(1)
        reason = "used up"
        slots.release()
        for task in waiting:
            with pytest.raises(SlotsClosed, match="used up"):
                await task
        reason = None
        with pytest.raises(SlotsClosed, match="used up"):
            await slots.acquire((0,))

    run_virtual(run())
    assert reasons == ["used up"]
