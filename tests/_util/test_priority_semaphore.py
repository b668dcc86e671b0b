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
async def hold_slot(slots: Slots, rank: int) -> AsyncGenerator[None]:
    """Hold a slot."""
    await slots.acquire((rank,))
    try:
        yield
    finally:
        slots.release()


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 9)), max_size=20))
def test_holders_stay_within_the_limit_and_every_slot_is_released(
    count: int, visits: list[tuple[int, int, int]]
) -> None:
    live = max_live = 0

    async def visit(slots: Slots, arrival: int, rank: int, stay: int, patience: float) -> None:
        nonlocal live, max_live
        await asyncio.sleep(arrival)
        async with asyncio.timeout(patience), hold_slot(slots, rank):
            live += 1
            max_live = max(max_live, live)
            try:
                await asyncio.sleep(stay)
            finally:
                live -= 1

    async def run() -> None:
        slots = Slots(count)
        going = [visit(slots, *arguments, 3.5 if index % 3 == 0 else 1e6) for index, arguments in enumerate(visits)]
        await asyncio.gather(*going, return_exceptions=True)
        for _ in range(count):  # all are free again
            await asyncio.wait_for(slots.acquire((0,)), 1)

    run_virtual(run())
    assert max_live <= count


def test_the_lowest_rank_is_next_and_ties_are_first_in_first_out() -> None:
    served = list[str]()

    async def visit(slots: Slots, rank: int, name: str) -> None:
        async with hold_slot(slots, rank):
            served.append(name)
            await asyncio.sleep(1)

    async def run() -> None:
        slots = Slots(1)
        await asyncio.gather(*(visit(slots, rank, name) for rank, name in ((5, "a"), (3, "b"), (1, "c"), (3, "d"))))

    run_virtual(run())
    assert served == ["a", "c", "b", "d"]


def test_closed_slots_reject_waiting_and_later_callers() -> None:
    reasons = list[str]()

    async def run() -> None:
        reason: str | None = None
        slots = Slots(1, find_close_reason=lambda: reason, on_close=reasons.append)
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
