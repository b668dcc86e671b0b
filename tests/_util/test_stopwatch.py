"""Time that counts against the limit of a rollout, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from rlkit._util.stopwatch import Stopwatch, use_stopwatches
from rlkit.errors import ServiceError
from rlkit.service.watch import SILENCE_S, ServiceWatch
from rlkit.testing import run_virtual

type Call = Callable[[ServiceWatch], Coroutine[object, object, object]]


def failing(until_s: float) -> Call:
    """A call that fails at once until then, and is made again."""

    async def make() -> None:
        if asyncio.get_running_loop().time() < until_s:
            raise ServiceError("busy")

    return lambda watch: watch.call(make, "sampling", retry=True)


def taking(seconds: float) -> Call:
    return lambda watch: watch.call(lambda: asyncio.sleep(seconds), "sampling")


def measure_rollout(*calls: Call, answers_every_s: float = 0.0, timeout_s: float = 3600) -> tuple[float, float]:
    """Play a rollout with these concurrent calls and 10 s of its own; return the counted and the elapsed time.

    Args:
        answers_every_s: interval at which the service answers another client meanwhile; 0: never.
    """

    async def run() -> tuple[float, float]:
        watch = ServiceWatch(lambda note: None, timeout_s=timeout_s)

        async def others() -> None:
            while answers_every_s:
                await taking(answers_every_s)(watch)

        elsewhere = asyncio.create_task(others())
        stopwatch = Stopwatch()
        with use_stopwatches([stopwatch]):
            await asyncio.gather(*(call(watch) for call in calls))
        await asyncio.sleep(10)
        elsewhere.cancel()
        return stopwatch.played_s, asyncio.get_running_loop().time()

    return run_virtual(run())


@pytest.mark.parametrize(("requests", "counts_s"), [(1, 0), (2, 600), (3, 1200), (5, 2400)])
def test_an_outage_is_excluded_once_for_any_number_of_waiting_requests(requests: int, counts_s: float) -> None:
    async def run() -> float:
        watch, stopwatch = ServiceWatch(lambda note: None, timeout_s=3600), Stopwatch()

        async def others() -> None:  # the service is silent for 600 s, and then it is not
            await asyncio.sleep(600)
            while True:
                await taking(10)(watch)

        elsewhere = asyncio.create_task(others())
        with use_stopwatches([stopwatch]):
            await asyncio.gather(*(taking(600 * number)(watch) for number in range(1, requests + 1)))
        elsewhere.cancel()
        return stopwatch.played_s

    assert run_virtual(run()) == pytest.approx(counts_s, abs=1)


def test_a_slow_call_counts() -> None:
    assert measure_rollout(taking(30)) == (40, 40)
    assert measure_rollout(taking(300), answers_every_s=20) == (310, 310)


@pytest.mark.parametrize("answers_every_s", [0, 20])
def test_a_failed_call_that_is_retried_does_not_count(answers_every_s: float) -> None:
    counted, elapsed_s = measure_rollout(failing(1500), answers_every_s=answers_every_s)
    assert counted == pytest.approx(10)
    assert elapsed_s > 1500


def test_an_unanswered_call_does_not_count() -> None:
    assert measure_rollout(taking(1500)) == (10, 1510)


def test_calls_that_wait_for_the_same_outage_are_excluded_once() -> None:
    assert measure_rollout(taking(1500), taking(1500), taking(1400)) == (10, 1510)


def test_a_call_that_keeps_failing_while_others_succeed_counts_after_a_timeout() -> None:
    counted, elapsed_s = measure_rollout(failing(1000), answers_every_s=20, timeout_s=400)
    assert counted == pytest.approx(elapsed_s - 400)


def find_limit_time(call: Call, *, limit_s: float, answers_at_s: float = 0.0) -> float | None:
    """Return the time at which a rollout with a call reaches its limit; None if it finishes first."""

    async def run() -> float | None:
        watch = ServiceWatch(lambda note: None, timeout_s=3600)
        stopwatch = Stopwatch()

        async def rollout() -> None:
            with use_stopwatches([stopwatch]):
                await call(watch)

        playing = asyncio.create_task(rollout())
        elsewhere = asyncio.create_task(taking(answers_at_s)(watch)) if answers_at_s else playing
        reached = await stopwatch.wait_for_limit(limit_s, playing)
        now_s = asyncio.get_running_loop().time()
        playing.cancel()
        await asyncio.gather(playing, elsewhere, return_exceptions=True)
        return now_s if reached else None

    return run_virtual(run())


def test_a_limit_shorter_than_an_outage_waits_for_its_end() -> None:
    assert SILENCE_S > 30
    assert find_limit_time(taking(1500), limit_s=20) is None
    assert find_limit_time(failing(1500), limit_s=20) is None
    assert find_limit_time(taking(1500), limit_s=20, answers_at_s=30) == pytest.approx(30, abs=2)


def test_without_a_call_the_limit_is_exact() -> None:
    assert find_limit_time(lambda watch: asyncio.sleep(100), limit_s=20) == 20
