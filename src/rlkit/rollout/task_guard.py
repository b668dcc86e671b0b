"""Containment of exits and asyncio tasks of rollouts.

Invariant: a SystemExit or KeyboardInterrupt raised by an environment, in a rollout or in an asyncio task that a rollout
created, becomes an ordinary exception, because asyncio would end the program. An exit raised by a signal handler ends
the program. Tasks that a rollout created end with the run; the run waits only for tasks that clean up.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import traceback
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import cast
from weakref import WeakSet

from rlkit._util.json_values import escape_surrogates, safe_str
from rlkit._util.loop_holds import loop_holds
from rlkit._util.stopwatch import Stopwatch, current_stopwatches

GRACE_S = 3.0
"""Time limit for cancelled tasks; well below the time limit for the end of a run."""

CLEAN_UP_S = 60.0
"""Time limit for clean-up tasks at the end of a run, because container engines are slow."""

type _Task = asyncio.Task[object]
type _Coroutine = Coroutine[object, object, object]

_rollout_tasks: ContextVar[dict[_Task, bool] | None] = ContextVar("rlkit_rollout_tasks", default=None)
"""Open tasks that rollouts of this run created; True for clean-up tasks."""

_abandoned = WeakSet[_Task]()


class EnvironmentExit(Exception):
    """An environment tried to end the program; the cause is its exception."""


@contextmanager
def guard_tasks() -> Generator[None]:
    """Guard rollouts and the tasks that they create on this event loop. Contexts may overlap."""
    loop = asyncio.get_running_loop()
    factory = cast("object", loop.get_task_factory())
    if not isinstance(factory, _TaskFactory):
        factory = _TaskFactory(cast("Callable[..., _Task] | None", factory))
        loop.set_task_factory(factory)  # pyright: ignore[reportArgumentType]  typeshed's takes no options
    factory.users += 1
    try:
        yield
    finally:
        factory.users -= 1
        # An environment may have set another task factory.
        if not factory.users and cast("object", loop.get_task_factory()) is factory:
            loop.set_task_factory(factory.earlier)  # pyright: ignore[reportArgumentType]  as above


@asynccontextmanager
async def stop_leftover_tasks() -> AsyncGenerator[None]:
    """Guard the tasks of rollouts and stop open tasks at the end, because rollouts may share a task.

    Clean-up tasks may run for `CLEAN_UP_S` first. A nested context leaves all tasks to the outer context.
    """
    if _rollout_tasks.get() is not None:
        yield
        return
    tasks = dict[_Task, bool]()
    token = _rollout_tasks.set(tasks)
    with guard_tasks():
        try:
            yield
        finally:
            _rollout_tasks.reset(token)
            try:
                if cleanups := [task for task, is_cleanup in tasks.items() if is_cleanup]:
                    await asyncio.wait(cleanups, timeout=CLEAN_UP_S)
            finally:
                await stop(tasks)


def register_cleanup(task: asyncio.Task[None]) -> bool:
    """Let the end of the run wait for a clean-up task; return False outside of a run."""
    tasks = _rollout_tasks.get()
    if tasks is None:
        return False
    tasks[cast("_Task", task)] = True
    task.add_done_callback(lambda done: tasks.pop(cast("_Task", done), None))
    return True


async def stop(tasks: Collection[_Task]) -> bool:
    """Cancel tasks, including tasks added meanwhile, and return whether all ended within `GRACE_S`.

    Tasks that did not end are abandoned: their coroutines are closed.
    """
    clock = asyncio.get_running_loop().time
    end_s, cancelled = clock() + GRACE_S, set[_Task]()
    try:
        while (pending := {task for task in tasks if not task.done()}) and clock() < end_s:
            for task in pending - cancelled:
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
                task.cancel()
            cancelled |= pending
            await asyncio.wait(pending, timeout=end_s - clock(), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stuck = {task for task in tasks if not task.done()}
        _abandoned.update(stuck)
        for task in stuck:
            task.cancel()
    return not stuck


class _TaskFactory:
    """A task factory that guards the tasks of rollouts."""

    def __init__(self, earlier: Callable[..., _Task] | None) -> None:
        self.earlier = earlier
        self.users = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: _Coroutine, /, **options: object) -> _Task:
        make_task = self.earlier or _make_task
        stopwatches, tasks = current_stopwatches(), _rollout_tasks.get()
        if not stopwatches or not asyncio.iscoroutine(coroutine):
            return make_task(loop, coroutine, **options)

        def close(task: _Task) -> None:
            with suppress(BaseException):  # still open if the task never started or was abandoned
                coroutine.close()
            if tasks is not None:
                tasks.pop(task, None)

        guarded = _guarded(_steps(coroutine, stopwatches))
        guarded.__qualname__ = getattr(coroutine, "__qualname__", guarded.__qualname__)
        task = make_task(loop, guarded, **options)
        if tasks is not None:
            tasks[task] = False
        task.add_done_callback(close)
        return task


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: _Coroutine, **options: object) -> _Task:
    return cast("Callable[..., _Task]", asyncio.Task)(coroutine, loop=loop, **options)


async def _guarded(steps: Awaitable[object]) -> object:
    return await steps


@types.coroutine
def _steps(coroutine: _Coroutine, stopwatches: frozenset[Stopwatch]) -> Generator[object, None, object]:
    """Run a coroutine, charge its holds of the event loop to stopwatches, and convert exits."""
    holds, error = loop_holds(), None
    while True:
        has_begun = holds.begin(stopwatches)
        try:
            waits_for = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as returned:
            return returned.value
        except (SystemExit, KeyboardInterrupt) as exiting:
            if _is_signalled(exiting):
                raise
            raise EnvironmentExit(escape_surrogates(f"{type(exiting).__name__}: {safe_str(exiting)}")) from exiting
        finally:
            error = None  # its traceback holds this frame
            if has_begun:
                holds.end()
        try:
            yield waits_for
        except BaseException as thrown:
            if asyncio.current_task() in _abandoned:
                del coroutine  # else the traceback keeps the coroutine alive past the event loop
                raise
            error = thrown


def _is_signalled(error: SystemExit | KeyboardInterrupt) -> bool:
    """Return whether a signal handler raised the error."""
    if threading.current_thread() is not threading.main_thread():  # Python runs signal handlers only there
        return False
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    if isinstance(error, KeyboardInterrupt) and handlers[0] is signal.default_int_handler:
        return True  # assumed: the handler is written in C and leaves no frame
    codes = {
        getattr(getattr(handler, "func", handler), "__code__", 0) for handler in handlers
    }  # asyncio's handler is a partial
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
