"""Tasks that an environment makes end their rollout, and neither the program nor the rollouts beside it."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import rlkit
from rlkit.rollout.runner import play_env
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.testing import ScriptedPolicy
from rlkit.types import Outcome

type Rollout = Callable[[], Coroutine[Any, Any, float]]
type Played = tuple[Outcome | None, str | None]


class Odd(rlkit.Env):
    """Plays a function."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    async def rollout(self, policy: rlkit.Policy) -> float:
        return await self._rollout()


async def play(*rollouts: Rollout) -> list[Played]:
    """Side by side."""
    played = [play_env(Odd(rollout), ScriptedPolicy([]), timeout_s=60.0) for rollout in rollouts]
    return await asyncio.gather(*played)


async def fine() -> float:
    await asyncio.sleep(0.05)
    return 1.0


async def exits(error: BaseException | None = None) -> float:
    await asyncio.sleep(0)
    raise error or SystemExit(3)


async def in_task() -> float:
    return await asyncio.create_task(exits())


async def in_task_of_task() -> float:
    return await asyncio.create_task(in_task())


async def at_once() -> float:
    async def now() -> float:
        sys.exit(3)

    return await asyncio.create_task(now())


async def in_group() -> float:
    async with asyncio.TaskGroup() as group:
        group.create_task(exits())
    return 1.0


async def while_cancelled() -> float:
    async def stubborn() -> float:
        try:
            await asyncio.Event().wait()
        finally:
            sys.exit(3)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    task.cancel()
    return await task


async def in_thread() -> float:
    return await asyncio.create_task(asyncio.to_thread(sys.exit, 3))


async def in_task_without_context() -> float:
    return await asyncio.create_task(exits(), context=contextvars.Context())


@pytest.mark.parametrize(
    "rollout", [exits, in_task, in_task_of_task, at_once, in_group, while_cancelled, in_thread, in_task_without_context]
)
def test_system_exit_in_a_task_fails_only_its_rollout(rollout: Rollout) -> None:
    failed, other = asyncio.run(play(rollout, fine))
    assert failed[0] is None
    assert (failed[1] or "").startswith("SystemExit: 3 at ")
    assert other == (Outcome(1.0), None)


def test_keyboard_interrupt_without_a_signal_fails_only_its_rollout() -> None:
    async def interrupted() -> float:
        return await asyncio.create_task(exits(KeyboardInterrupt()))

    for rollout in (interrupted, lambda: exits(KeyboardInterrupt())):
        failed, other = asyncio.run(play(rollout, fine))
        assert (failed[1] or "").startswith("KeyboardInterrupt")
        assert other == (Outcome(1.0), None)


def test_system_exit_in_an_unawaited_task_fails_nothing() -> None:
    exceptions = list[str]()

    async def forgets() -> float:
        asyncio.get_running_loop().set_exception_handler(lambda loop, about: exceptions.append(str(about["exception"])))
        asyncio.create_task(exits())  # noqa: RUF006  on purpose
        await asyncio.sleep(0.01)
        gc.collect()
        return 1.0

    assert asyncio.run(play(forgets)) == [(Outcome(1.0), None)]
    assert [text.partition(" at ")[0] for text in exceptions] == ["SystemExit: 3"]


@pytest.mark.parametrize("inside", [exits, in_task], ids=["rollout", "task"])
def test_a_signal_during_a_rollout_ends_the_program(inside: object) -> None:
    async def terminated() -> float:
        signal.raise_signal(signal.SIGTERM)
        return 1.0

    async def interrupted() -> float:
        for _ in range(2):  # the first only cancels, as asyncio has it
            signal.raise_signal(signal.SIGINT)
        return 1.0

    async def interrupted_as_by_default() -> float:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)
        return 1.0

    async def in_another(rollout: Rollout) -> float:
        return await asyncio.create_task(rollout())

    def rollout(of: Rollout) -> Rollout:
        return of if inside is exits else lambda: in_another(of)

    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(15))
    try:
        with pytest.raises(SystemExit, match="15"):
            asyncio.run(play(rollout(terminated), fine))
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(play(rollout(interrupted), fine))
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(play(rollout(interrupted_as_by_default), fine))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_guarded_tasks_behave_like_plain_tasks() -> None:
    variable = contextvars.ContextVar("variable", default="")
    task_descriptions = list[str]()

    async def child() -> str:
        task = asyncio.current_task()
        assert task is not None
        task_descriptions.append(f"{task.get_name()} {variable.get()} {'child' in repr(task)} {bool(task.get_stack())}")
        await asyncio.sleep(0)
        return "done"

    async def makes() -> float:
        variable.set("inherited")
        context = contextvars.copy_context()
        context.run(variable.set, "given")
        tasks = [asyncio.create_task(child(), name="one"), asyncio.create_task(child(), name="two", context=context)]
        assert await asyncio.gather(*tasks) == ["done", "done"]
        never = asyncio.create_task(child())
        never.cancel()
        await asyncio.wait([never])
        assert never.cancelled()
        with pytest.raises(TypeError, match="a coroutine was expected"):
            asyncio.get_running_loop().create_task(3)  # type: ignore[arg-type]  on purpose
        return 1.0

    assert asyncio.run(play(makes)) == [(Outcome(1.0), None)]
    assert task_descriptions == ["one inherited True True", "two given True True"]
    gc.collect()  # a coroutine that was never awaited would be a warning


def test_task_factory_of_the_program_is_used_and_restored_at_the_end_of_a_run() -> None:
    started = list[str]()

    async def child() -> None:
        started.append("child")

    async def makes() -> float:
        task = asyncio.create_task(child())
        started.append("rollout")
        await task
        return await asyncio.create_task(exits())

    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with stop_leftover_tasks():
            await play(in_task, fine)
        assert loop.get_task_factory() is None
        loop.set_task_factory(asyncio.eager_task_factory)
        async with stop_leftover_tasks():
            failed, at_once_ = await play(makes, at_once)
        assert (failed[1] or "").startswith("SystemExit: 3")
        assert (at_once_[1] or "").startswith("SystemExit: 3")
        assert loop.get_task_factory() is asyncio.eager_task_factory

    asyncio.run(run())
    assert started == ["child", "rollout"]


def test_the_end_of_a_run_leaves_the_tasks_of_another_run_guarded() -> None:
    ended = asyncio.Event()

    async def exits_later() -> float:
        await ended.wait()
        return await asyncio.create_task(exits())

    async def short() -> None:
        async with stop_leftover_tasks():
            await play(fine)
        ended.set()

    async def long() -> list[Played]:
        async with stop_leftover_tasks():
            return await play(exits_later)

    async def both() -> list[Played]:
        _, played = await asyncio.gather(short(), long())
        return played

    ((outcome, error),) = asyncio.run(both())
    assert outcome is None
    assert (error or "").startswith("SystemExit: 3 at ")


def test_task_factory_set_by_an_environment_is_kept() -> None:
    async def sets() -> float:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        return 1.0

    async def run() -> None:
        assert await play(sets) == [(Outcome(1.0), None)]
        assert asyncio.get_running_loop().get_task_factory() is asyncio.eager_task_factory
        assert (await play(in_task))[0][0] is None

    asyncio.run(run())


@pytest.mark.parametrize(
    "fault", [rlkit.ServiceError("gone"), rlkit.UsageError("no images"), rlkit.MissingError("no x")]
)
def test_error_outside_the_environment_is_raised_from_its_tasks_too(fault: rlkit.RlkitError) -> None:
    async def fails() -> float:
        raise fault

    async def in_group() -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(exits(ValueError("its own")))
            async with asyncio.TaskGroup() as inner:
                inner.create_task(fails())
        return 1.0

    async def own_alone() -> float:
        raise ExceptionGroup("several", [ValueError("its own"), KeyError("x")])

    with pytest.raises(type(fault), match=str(fault)):
        asyncio.run(play(in_group))
    ((outcome, error),) = asyncio.run(play(own_alone))
    assert outcome is None
    assert error == "ValueError: its own"


def test_the_error_of_a_rollout_that_fails_as_the_run_ends_is_retrieved() -> None:
    reports = list[str]()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, about: reports.append(about["message"]))
        may_fail = asyncio.Event()

        async def fails() -> float:
            await may_fail.wait()
            raise rlkit.EnvironmentFault("the judge failed")

        playing = asyncio.create_task(play_env(Odd(fails), ScriptedPolicy([]), timeout_s=60.0))
        await asyncio.sleep(0.01)
        may_fail.set()
        playing.cancel()  # in the same iteration of the event loop
        await asyncio.wait([playing])

    asyncio.run(main())
    gc.collect()
    assert reports == []
