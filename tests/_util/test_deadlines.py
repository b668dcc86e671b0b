"""Waiting for an answer leaves nothing behind in the waiting task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from rlkit._util.deadlines import AnswerWait, Deadlines, NoAnswer
from rlkit.errors import ServiceError
from rlkit.testing import run_virtual

WITHIN_S = 100.0


async def answer_after(seconds: float, answer: str | Exception) -> str:
    await asyncio.sleep(seconds)
    if isinstance(answer, Exception):
        raise answer
    return answer


def await_answer(
    first: Callable[[], Awaitable[str]], *, second: tuple[float, str] | None = None, limit_s: float | None = None
) -> tuple[object, float]:
    """Return the result of a wait and its duration; assert that the waiting task is not cancelled afterwards."""

    async def run() -> tuple[object, float]:
        clock, task = asyncio.get_running_loop().time, asyncio.current_task()
        assert task is not None
        began, result = clock(), object()
        second_request = None if second is None else partial(answer_after, *second)
        wait = AnswerWait[str](Deadlines(), WITHIN_S, repeat=second_request)
        try:
            async with asyncio.timeout(limit_s):
                result = await wait.wait(first(), "sampling")
        except (ServiceError, TimeoutError) as error:
            result = error
        took_s = clock() - began
        assert task.cancelling() == 0
        await asyncio.sleep(10 * WITHIN_S)  # nothing that was under way disturbs it
        return result, took_s

    return run_virtual(run())


def test_answer_in_time_is_returned_at_once() -> None:
    assert await_answer(lambda: answer_after(3, "one"), second=(1, "two")) == ("one", 3)


def test_single_request_has_the_whole_limit() -> None:
    assert await_answer(lambda: answer_after(99, "one")) == ("one", 99)
    result, took_s = await_answer(lambda: answer_after(101, "one"))
    assert isinstance(result, NoAnswer)
    assert took_s == pytest.approx(WITHIN_S)


def test_first_answer_of_two_requests_is_returned() -> None:
    assert await_answer(lambda: answer_after(1e9, "one"), second=(7, "two")) == ("two", 57)
    assert await_answer(lambda: answer_after(55, "one"), second=(7, "two")) == ("one", 55)
    result, took_s = await_answer(lambda: answer_after(1e9, "one"), second=(1e9, "two"))
    assert str(result) == "sampling: no answer within 100 s"
    assert took_s == pytest.approx(WITHIN_S)


def test_simultaneous_answers_give_one_result() -> None:
    result, took_s = await_answer(lambda: answer_after(57, "one"), second=(7, "two"))
    assert result in ("one", "two")
    assert took_s == 57


def test_failure_of_the_first_request_does_not_end_the_second() -> None:
    assert await_answer(lambda: answer_after(60, ServiceError("busy")), second=(20, "two")) == ("two", 70)
    result, took_s = await_answer(lambda: answer_after(60, ServiceError("busy")), second=(1e9, "two"))
    assert isinstance(result, NoAnswer)
    assert took_s == pytest.approx(WITHIN_S)
    result, took_s = await_answer(lambda: answer_after(40, ServiceError("busy")), second=(1, "two"))
    assert (str(result), took_s) == ("busy", 40)


def test_outer_timeout_is_respected() -> None:
    for limit_s in (30.0, 60.0, WITHIN_S):
        result, took_s = await_answer(lambda: answer_after(1e9, "one"), second=(1e9, "two"), limit_s=limit_s)
        assert isinstance(result, TimeoutError | NoAnswer)
        assert took_s == pytest.approx(limit_s)


def test_a_request_that_cannot_be_cancelled_leaves_no_cancellation_behind() -> None:
    async def stubborn() -> str:
        try:
            return await answer_after(1e9, "one")
        except asyncio.CancelledError:
            return "late"

    assert await_answer(stubborn) == ("late", WITHIN_S)


def test_waits_share_one_timer() -> None:
    async def run() -> list[object]:
        deadlines = Deadlines()
        waits = [
            AnswerWait[str](deadlines, limit_s, repeat=None).wait(answer_after(20, str(limit_s)), "x")
            for limit_s in (50, 10, 30, 5, 15)
        ]
        return await asyncio.gather(*waits, return_exceptions=True)

    results = run_virtual(run())
    assert [result if isinstance(result, str) else type(result) for result in results] == [
        "50",
        NoAnswer,
        "30",
        NoAnswer,
        NoAnswer,
    ]
