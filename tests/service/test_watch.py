"""Patience with a service, on virtual time."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from rlkit.errors import ServiceError, UsageError
from rlkit.service.watch import SILENCE_S, ServiceWatch
from rlkit.testing import run_virtual


def test_idempotent_call_is_retried_until_it_succeeds() -> None:
    request_times, notes = list[float](), list[str]()

    async def run() -> str:
        watch = ServiceWatch(notes.append, timeout_s=100)

        async def make() -> str:
            request_times.append(asyncio.get_running_loop().time())
            if len(request_times) < 5:
                raise ServiceError("busy", request_id="r")
            return "done"

        return await watch.call(make, "sampling", retry=True)

    assert run_virtual(run()) == "done"
    assert len(request_times) == 5
    assert sorted(request_times) == request_times
    assert len(set(request_times)) == 5  # not all at once
    assert notes == ["busy (request r); retrying"]


def test_call_that_is_not_idempotent_is_not_retried() -> None:
    async def run() -> None:
        async def make() -> None:
            raise ServiceError("busy")

        with pytest.raises(ServiceError, match="busy"):
            await ServiceWatch(lambda note: None, timeout_s=100).call(make, "training")

    run_virtual(run())


@pytest.mark.parametrize("retry", [True, False])
def test_silent_service_fails_after_the_timeout(retry: bool) -> None:
    async def run() -> float:
        async def make() -> None:
            await asyncio.Event().wait()

        with pytest.raises(ServiceError, match="sampling: no answer within 100 s"):
            await ServiceWatch(lambda note: None, timeout_s=100).call(make, "sampling", retry=retry)
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == 100


def test_failing_service_fails_after_the_timeout() -> None:
    async def run() -> float:
        async def make() -> None:
            raise ServiceError("busy")

        with pytest.raises(ServiceError, match="busy"):
            await ServiceWatch(lambda note: None, timeout_s=100).call(make, "sampling", retry=True)
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == pytest.approx(100)


def test_timeout_of_the_caller_is_an_ordinary_failure() -> None:
    async def run() -> None:
        async def make() -> None:
            raise ServiceError("sampling: TimeoutError") from TimeoutError()

        with pytest.raises(ServiceError, match="sampling: TimeoutError"):
            await ServiceWatch(lambda note: None, timeout_s=100).call(make, "sampling", retry=True)
        assert asyncio.get_running_loop().time() == pytest.approx(100, abs=1)  # it was made again until then

    run_virtual(run())


def test_unused_service_does_not_time_out() -> None:
    async def run() -> tuple[bool, bool]:
        async def refuse() -> None:
            raise ServiceError("busy")

        async def hang() -> None:
            await asyncio.Event().wait()

        watch = ServiceWatch(lambda note: None, timeout_s=100)
        await watch.call(lambda: asyncio.sleep(0), "sampling")
        await asyncio.sleep(5000)
        with pytest.raises(ServiceError):
            await watch.call(refuse, "training")
        refused = watch.is_service_gone
        with pytest.raises(ServiceError):
            await watch.call(hang, "training")
        return refused, watch.is_service_gone

    assert run_virtual(run()) == (False, True)


def test_usage_error_is_not_retried() -> None:
    async def run() -> None:
        async def make() -> None:
            raise UsageError("no such model")

        with pytest.raises(UsageError):
            await ServiceWatch(lambda note: None, timeout_s=100).call(make, "sampling", retry=True)

    run_virtual(run())


def test_silence_is_reported_with_growing_pauses() -> None:
    notes = list[tuple[float, str]]()

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        watch = ServiceWatch(lambda note: notes.append((clock(), note)), timeout_s=7200)
        looking = asyncio.create_task(watch.note_silences())
        await asyncio.sleep(1000)  # nobody asks for anything: there is nothing to say
        asking = asyncio.create_task(watch.call(lambda: asyncio.sleep(3600), "sampling"))
        await asyncio.sleep(10)
        watch.remember_warning("Sampling is paused. Reason: billing")
        await asking
        looking.cancel()

    run_virtual(run())
    times = [time for time, _ in notes]
    assert SILENCE_S <= times[0] - 1000 <= 60
    assert notes[0][1].endswith(
        "waiting for: sampling (1); the Tinker client says: Sampling is paused. Reason: billing"
    )
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert 3 <= len(notes) <= 10


def test_failing_call_is_reported_with_growing_pauses_while_other_calls_succeed() -> None:
    notes = list[float]()
    broken = True

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        watch = ServiceWatch(lambda note: notes.append(clock()), timeout_s=7200)

        async def make() -> None:
            if broken:
                raise ServiceError("busy")

        async def others() -> None:
            while True:
                await watch.call(lambda: asyncio.sleep(1), "training")

        elsewhere = asyncio.create_task(others())

        async def failing(until_s: float) -> None:
            nonlocal broken
            broken = True
            asking = asyncio.create_task(watch.call(make, "sampling", retry=True))
            await asyncio.sleep(until_s - clock())
            broken = False
            await asking

        await failing(1500)
        await asyncio.sleep(300)
        await failing(2200)
        elsewhere.cancel()

    run_virtual(run())
    first, second = ([time for time in notes if (time < 1600) == early] for early in (True, False))
    gaps = [later - earlier for earlier, later in itertools.pairwise(first)]
    assert gaps == sorted(gaps)
    assert gaps[0] >= 60
    assert 3 <= len(first) <= 6
    assert 1 <= len(second) <= 4  # the second trouble is told of at once
    assert second[0] - first[-1] < 1200


def test_silence_is_reported_right_after_a_failure() -> None:
    notes = list[str]()

    async def run() -> None:
        watch = ServiceWatch(notes.append, timeout_s=7200)
        attempts = 0

        async def make() -> None:
            nonlocal attempts
            attempts += 1
            if attempts == 1:
                raise ServiceError("busy")
            await asyncio.sleep(60)

        async with watch.watch_silence():
            await watch.call(make, "sampling", retry=True)

    run_virtual(run())
    assert [note.split(";")[0] for note in notes] == ["busy", "no answer from the service for 45 s"]


def test_computing_service_is_not_reported_as_silent() -> None:
    notes, computing = list[str](), [True]

    async def run() -> None:
        watch = ServiceWatch(notes.append, timeout_s=7200, is_computing=lambda: computing[0])

        async def make() -> None:
            await asyncio.sleep(600)
            computing[0] = False
            await asyncio.sleep(60)

        async with watch.watch_silence():
            await watch.call(make, "sampling", retry=True)

    run_virtual(run())
    (note,) = notes
    assert 600 <= float(note.removeprefix("no answer from the service for ").partition(" ")[0]) < 660


def test_slow_request_is_awaited_until_the_timeout() -> None:
    async def run() -> float:
        await ServiceWatch(lambda note: None, timeout_s=100).call(lambda: asyncio.sleep(99), "sampling", retry=True)
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == 99


def test_slow_request_is_awaited_after_its_repeat_fails() -> None:
    async def run() -> tuple[str, float]:
        attempts = 0

        async def make() -> str:
            nonlocal attempts
            attempts += 1
            if attempts == 2:
                raise ServiceError("slow down")
            await asyncio.sleep(580)
            return "done"

        answer = await ServiceWatch(lambda note: None, timeout_s=600).call(make, "sampling", retry=True)
        return answer, asyncio.get_running_loop().time()

    assert run_virtual(run()) == ("done", 580)


def test_lost_request_is_repeated_before_the_timeout() -> None:
    async def run() -> tuple[str, float]:
        attempts = 0

        async def make() -> str:
            nonlocal attempts
            attempts += 1
            if attempts == 1:
                await asyncio.Event().wait()
            await asyncio.sleep(10)
            return "done"

        answer = await ServiceWatch(lambda note: None, timeout_s=600).call(make, "sampling", retry=True)
        return answer, asyncio.get_running_loop().time()

    assert run_virtual(run()) == ("done", 300 + 10)
