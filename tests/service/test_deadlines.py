"""The wait for one answer: what it leaves behind in the task that waits, which is nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from rlkit.errors import ServiceError
from rlkit.service.deadlines import AnswerWait, Deadlines, NoAnswer
from rlkit.testing import run_virtual

WITHIN_S = 100.0


async def after(seconds: float, answer: str | Exception) -> str:
    await asyncio.sleep(seconds)
    if isinstance(answer, Exception):
        raise answer
    return answer


def waited(
    first: Callable[[], Awaitable[str]], *, second: tuple[float, str] | None = None, limit_s: float | None = None
) -> tuple[object, float]:
    """What came of a wait, and when; afterwards the task goes on undisturbed."""

    async def run() -> tuple[object, float]:
        clock, task = asyncio.get_running_loop().time, asyncio.current_task()
        assert task is not None
        began, found = clock(), object()
        again = None if second is None else partial(after, *second)
        wait = AnswerWait[str](Deadlines(), WITHIN_S, repeat=again)
        try:
            async with asyncio.timeout(limit_s):
                found = await wait.wait(first(), "sampling")
        except (ServiceError, TimeoutError) as error:
            found = error
        took_s = clock() - began
        assert task.cancelling() == 0
        await asyncio.sleep(10 * WITHIN_S)  # nothing that was under way disturbs it
        return found, took_s

    return run_virtual(run())


def test_an_answer_in_time_is_given_at_once() -> None:
    assert waited(lambda: after(3, "one"), second=(1, "two")) == ("one", 3)


def test_without_a_second_request_the_first_has_all_the_time() -> None:
    assert waited(lambda: after(99, "one")) == ("one", 99)
    found, took_s = waited(lambda: after(101, "one"))
    assert isinstance(found, NoAnswer)
    assert took_s == pytest.approx(WITHIN_S)


def test_whichever_of_the_two_answers_first_is_heard() -> None:
    assert waited(lambda: after(1e9, "one"), second=(7, "two")) == ("two", 57)
    assert waited(lambda: after(55, "one"), second=(7, "two")) == ("one", 55)
    found, took_s = waited(lambda: after(1e9, "one"), second=(1e9, "two"))
    assert str(found) == "sampling: no answer within 100 s"
    assert took_s == pytest.approx(WITHIN_S)


def test_two_answers_at_the_same_time_are_one() -> None:
    found, took_s = waited(lambda: after(57, "one"), second=(7, "two"))
    assert found in ("one", "two")
    assert took_s == 57


def test_a_first_request_that_fails_leaves_the_second_its_time() -> None:
    assert waited(lambda: after(60, ServiceError("busy")), second=(20, "two")) == ("two", 70)
    found, took_s = waited(lambda: after(60, ServiceError("busy")), second=(1e9, "two"))
    assert isinstance(found, NoAnswer)
    assert took_s == pytest.approx(WITHIN_S)
    found, took_s = waited(lambda: after(40, ServiceError("busy")), second=(1, "two"))
    assert (str(found), took_s) == ("busy", 40)


def test_a_limit_of_somebody_elses_is_kept() -> None:
    for limit_s in (30.0, 60.0, WITHIN_S):
        found, took_s = waited(lambda: after(1e9, "one"), second=(1e9, "two"), limit_s=limit_s)
        assert isinstance(found, TimeoutError | NoAnswer)
        assert took_s == pytest.approx(limit_s)


def test_a_request_that_cannot_be_cancelled_leaves_no_cancellation_behind() -> None:
    async def stubborn() -> str:
        try:
            return await after(1e9, "one")
        except asyncio.CancelledError:
            return "late"

    assert waited(stubborn) == ("late", WITHIN_S)


def test_one_timer_serves_all_who_wait() -> None:
    async def run() -> list[object]:
        deadlines = Deadlines()
        waits = [
            AnswerWait[str](deadlines, limit_s, repeat=None).wait(after(20, str(limit_s)), "x")
            for limit_s in (50, 10, 30, 5, 15)
        ]
        return await asyncio.gather(*waits, return_exceptions=True)

    found = run_virtual(run())
    assert [one if isinstance(one, str) else type(one) for one in found] == ["50", NoAnswer, "30", NoAnswer, NoAnswer]
