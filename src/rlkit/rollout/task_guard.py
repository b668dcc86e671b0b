"""Keeping a rollout's exits and its tasks to itself.

Invariant: a SystemExit or KeyboardInterrupt that an environment raises, in a rollout or in a task made inside one, ends
as an ordinary exception: asyncio would end the program with it. One that a signal handler raised ends the program. No
task made inside a rollout outlasts the run, or keeps it from ending; those that clean up are waited for.
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
"""Time limit of tasks once they are cancelled; well under that of the whole run then."""

CLEANING_S = 60.0
"""Time limit, at the end of a run, of tasks that clean up behind rollouts: container engines are slow."""

type _Task = asyncio.Task[object]
type _Coroutine = Coroutine[object, object, object]

_made_inside: ContextVar[dict[_Task, bool] | None] = ContextVar("rlkit_made_inside", default=None)
"""The tasks that the rollouts of this run made and that go on, and whether the end of the run waits for them."""

_given_up = WeakSet[_Task]()


class EnvironmentExit(Exception):
    """An environment asked the program to end; the cause is the exception that it raised."""


@contextmanager
def guard_tasks() -> Generator[None]:
    """Guard rollouts and the tasks that they make on this event loop. It may be entered many times at once."""
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
        # An environment may have set another one.
        if not factory.users and cast("object", loop.get_task_factory()) is factory:
            loop.set_task_factory(factory.earlier)  # pyright: ignore[reportArgumentType]  as above


@asynccontextmanager
async def stop_leftover_tasks() -> AsyncGenerator[None]:
    """Guard the tasks of rollouts, and stop those that are still there at the end: rollouts may share a task.

    Those that clean up have `CLEANING_S` first. Entered inside another one, it leaves all tasks to that one.
    """
    if _made_inside.get() is not None:
        yield
        return
    made = dict[_Task, bool]()
    token = _made_inside.set(made)
    with guard_tasks():
        try:
            yield
        finally:
            _made_inside.reset(token)
            try:
                if cleaning := [task for task, cleans in made.items() if cleans]:
                    await asyncio.wait(cleaning, timeout=CLEANING_S)
            finally:
                await stop(made)


def register_cleanup(task: asyncio.Task[None]) -> bool:
    """Let the end of the run wait for a task that cleans up after a rollout; False if there is no run that would."""
    made = _made_inside.get()
    if made is None:
        return False
    made[cast("_Task", task)] = True
    task.add_done_callback(lambda done: made.pop(cast("_Task", done), None))
    return True


async def stop(tasks: Collection[_Task]) -> bool:
    """Cancel tasks, also those that are added while they end, and return whether all ended within `GRACE_S`.

    Those that go on are given up: their coroutines are closed.
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
        _given_up.update(stuck)
        for task in stuck:
            task.cancel()
    return not stuck


class _TaskFactory:
    """Makes tasks as the event loop did before, and guards those of rollouts."""

    def __init__(self, earlier: Callable[..., _Task] | None) -> None:
        self.earlier = earlier
        self.users = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: _Coroutine, /, **options: object) -> _Task:
        make = self.earlier or _make_task
        stopwatches, made = current_stopwatches(), _made_inside.get()
        if not stopwatches or not asyncio.iscoroutine(coroutine):
            return make(loop, coroutine, **options)

        def end(task: _Task) -> None:
            with suppress(BaseException):  # of a task that never began or was given up, it is not closed yet
                coroutine.close()
            if made is not None:
                made.pop(task, None)

        guarded = _guarded(_steps(coroutine, stopwatches))
        guarded.__qualname__ = getattr(coroutine, "__qualname__", guarded.__qualname__)
        task = make(loop, guarded, **options)
        if made is not None:
            made[task] = False
        task.add_done_callback(end)
        return task


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: _Coroutine, **options: object) -> _Task:
    return cast("Callable[..., _Task]", asyncio.Task)(coroutine, loop=loop, **options)


async def _guarded(steps: Awaitable[object]) -> object:
    return await steps


@types.coroutine
def _steps(coroutine: _Coroutine, stopwatches: frozenset[Stopwatch]) -> Generator[object, None, object]:
    """Run a coroutine, charge its holds of the event loop to stopwatches, and let no exit out."""
    holds, error = loop_holds(), None
    while True:
        begun = holds.begin(stopwatches)
        try:
            waits_for = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as returned:
            return returned.value
        except (SystemExit, KeyboardInterrupt) as asked:
            if _is_signalled(asked):
                raise
            raise EnvironmentExit(escape_surrogates(f"{type(asked).__name__}: {safe_str(asked)}")) from asked
        finally:
            error = None  # its traceback holds this frame
            if begun:
                holds.end()
        try:
            yield waits_for
        except BaseException as thrown:
            if asyncio.current_task() in _given_up:
                del coroutine  # the traceback would keep it until there is no event loop to close it in
                raise
            error = thrown


def _is_signalled(error: SystemExit | KeyboardInterrupt) -> bool:
    """Return whether a signal handler raised an error, on top of what ran then."""
    if threading.current_thread() is not threading.main_thread():  # handlers run in that one
        return False
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    if isinstance(error, KeyboardInterrupt) and handlers[0] is signal.default_int_handler:
        return True  # perhaps: it is written in C and leaves no trace
    codes = {getattr(getattr(handler, "func", handler), "__code__", 0) for handler in handlers}  # asyncio's is partial
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
