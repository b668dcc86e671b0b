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
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any, cast, override

from rlkit._util.json_values import escape_surrogates, safe_str
from rlkit._util.loop_holds import LoopHolds, loop_holds
from rlkit._util.stopwatch import Stopwatch, current_stopwatches
from rlkit._util.threads import mark_retrieved

GRACE_S = 3.0
"""Time limit for cancelled tasks; well below the time limit for the end of a run."""

CLEAN_UP_S = 60.0
"""Time limit for clean-up tasks at the end of a run, because container engines are slow."""

type _Task = asyncio.Task[object]
type _Coroutine = Coroutine[object, object, object]

_rollout_tasks: ContextVar[dict[_Task, bool]] = ContextVar("rlkit_rollout_tasks")
"""Open tasks that rollouts of this run created; True for clean-up tasks."""


class EnvironmentExit(Exception):
    """An environment tried to end the program; the cause is its exception."""


def guard_tasks() -> _TaskFactory:
    """Guard the tasks that rollouts create on the running event loop, until all its runs end."""
    loop = asyncio.get_running_loop()
    factory = cast("object", loop.get_task_factory())
    if not isinstance(factory, _TaskFactory):
        factory = _TaskFactory(cast("Callable[..., _Task] | None", factory))
        loop.set_task_factory(factory)  # pyright: ignore[reportArgumentType]  typeshed's takes no options
    return factory


@asynccontextmanager
async def stop_leftover_tasks() -> AsyncGenerator[None]:
    """Stop the open tasks of rollouts at the end, because rollouts may share a task.

    Clean-up tasks may run for `CLEAN_UP_S` first. A nested context leaves all tasks to the outer context.
    """
    if _rollout_tasks.get(None) is not None:
        yield
        return
    tasks = dict[_Task, bool]()
    token = _rollout_tasks.set(tasks)
    factory = guard_tasks()
    factory.runs += 1
    try:
        yield
    finally:
        _rollout_tasks.reset(token)
        try:
            if cleanups := [task for task, is_cleanup in tasks.items() if is_cleanup]:
                await asyncio.wait(cleanups, timeout=CLEAN_UP_S)
        finally:
            await stop(tasks)
            factory.runs -= 1
            loop = asyncio.get_running_loop()
            # An environment may have set another task factory.
            if not factory.runs and cast("object", loop.get_task_factory()) is factory:
                loop.set_task_factory(factory.earlier)  # pyright: ignore[reportArgumentType]  as above


def register_cleanup(task: asyncio.Task[None]) -> bool:
    """Let the end of the run wait for a clean-up task; return False outside of a run."""
    if (tasks := _rollout_tasks.get(None)) is None:
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
                task.add_done_callback(mark_retrieved)
                task.cancel()
            cancelled |= pending
            await asyncio.wait(pending, timeout=end_s - clock(), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stuck = {task for task in tasks if not task.done()}
        for task in stuck:
            if isinstance(coroutine := task.get_coro(), _GuardedCoroutine):
                coroutine.close()
            task.cancel()
    return not stuck


class _TaskFactory:
    """A task factory that guards the tasks of rollouts, on top of an earlier factory."""

    def __init__(self, earlier: Callable[..., _Task] | None) -> None:
        self.earlier = earlier
        self._make_task = earlier or _make_task
        self._holds = loop_holds()
        self.runs = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: _Coroutine, /, **options: object) -> _Task:
        stopwatches = current_stopwatches()
        if not stopwatches or not asyncio.iscoroutine(coroutine):
            return self._make_task(loop, coroutine, **options)
        guarded = _GuardedCoroutine(coroutine, stopwatches, self._holds)
        task = self._make_task(loop, guarded, **options)
        tasks = _rollout_tasks.get({})  # outside of a run, nobody stops them
        tasks[task] = False

        def end(done: _Task) -> None:
            guarded.close()  # a task that is cancelled before it starts leaves it open
            tasks.pop(done, None)

        task.add_done_callback(end)
        return task


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: _Coroutine, **options: Any) -> _Task:
    return asyncio.Task(coroutine, loop=loop, **options)


class _GuardedCoroutine(Coroutine[object, object, object]):
    """A coroutine whose holds of the event loop are charged to stopwatches, and whose exits are ordinary exceptions."""

    def __init__(self, coroutine: _Coroutine, stopwatches: frozenset[Stopwatch], holds: LoopHolds) -> None:
        self._coroutine: _Coroutine | None = coroutine
        self._stopwatches = stopwatches
        self._holds = holds
        self.__qualname__ = getattr(coroutine, "__qualname__", "")  # the name in messages of asyncio

    def __getattr__(self, name: str) -> object:
        return getattr(self._coroutine, name)  # asyncio shows the frames of a coroutine

    @override
    def __await__(self) -> Generator[object, None, object]:
        raise TypeError("a guarded coroutine belongs to its task")

    @override
    def send(self, value: object, /) -> object:
        assert self._coroutine is not None  # an abandoned task is cancelled, so asyncio throws into it
        return self._resume(self._coroutine.send, value)

    @override
    def throw(self, *error: Any) -> object:
        if self._coroutine is None:
            raise error[0]
        return self._resume(self._coroutine.throw, *error)

    @override
    def close(self) -> None:
        """Close the coroutine, and drop it: if it ignores `GeneratorExit`, it must not outlive the event loop."""
        coroutine, self._coroutine = self._coroutine, None
        if coroutine is not None:
            with suppress(BaseException):
                coroutine.close()

    def _resume[*Ts](self, resume: Callable[[*Ts], object], *values: *Ts) -> object:
        has_begun = self._holds.begin(self._stopwatches)
        try:
            return resume(*values)
        except (SystemExit, KeyboardInterrupt) as exiting:
            if _is_signalled(exiting):
                raise
            raise EnvironmentExit(escape_surrogates(f"{type(exiting).__name__}: {safe_str(exiting)}")) from exiting
        finally:
            if has_begun:
                self._holds.end()


def _is_signalled(error: SystemExit | KeyboardInterrupt) -> bool:
    """Return whether a signal handler raised the error."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    if isinstance(error, KeyboardInterrupt) and handlers[0] is signal.default_int_handler:
        # Assumed: this handler leaves no frame, because it is written in C. Only the main thread runs handlers.
        return threading.current_thread() is threading.main_thread()
    functions = [getattr(handler, "func", handler) for handler in handlers]  # asyncio's handler is a partial
    codes = {getattr(function, "__code__", None) for function in functions}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
