"""Keeping a rollout's exits, its tasks and its forks to itself.

Invariant: SystemExit and KeyboardInterrupt out of a rollout, or out of any task that was made inside one, end as an
ordinary exception: asyncio would end the whole program with them. What a signal asks for goes through. No task that
was made inside a rollout outlasts the run, or keeps it from ending; those that clean up are waited for. A process that
one forked runs nothing but it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import traceback
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Never, Protocol, cast, override
from weakref import WeakSet

from rlkit._util.json_values import readable, text_of
from rlkit._util.loop_holds import loop_holds
from rlkit._util.stopwatch import Stopwatch, running

GRACE_S = 3.0
"""What tasks may take to end once they are cancelled; well under what the whole run may take then."""

CLEANING_S = 60.0
"""What the end of a run waits for tasks that clean up behind rollouts: container engines take their time."""

type _Task = asyncio.Task[object]

_process = os.getpid()

_in_rollout: ContextVar[int] = ContextVar("rlkit_in_rollout", default=0)
"""The number of the process in which the rollout began, inside one."""

_made_inside: ContextVar[WeakSet[_Task] | None] = ContextVar("rlkit_made_inside", default=None)
"""All tasks that the rollouts of this run made."""

_cleaning: ContextVar[set[_Task] | None] = ContextVar("rlkit_cleaning", default=None)
"""Those of them that clean up, and are to be waited for."""


def _forked() -> None:
    global _process  # noqa: PLW0603  there is one
    _process = os.getpid()


os.register_at_fork(after_in_child=_forked)


def begin() -> None:
    """Say that this task plays a rollout, and so does all that it makes."""
    _in_rollout.set(_process)


def contained(playing: Coroutine[object, object, object], *stopwatches: Stopwatch) -> Coroutine[object, object, object]:
    """What plays a rollout, for a task of its own.

    Args:
        playing: the coroutine of the rollout.
        stopwatches: the clocks that are charged with the time for which it holds the event loop.
    """
    return _Guarded(playing, _process, stopwatches)


def plays(task: asyncio.Task[object]) -> bool:
    """Whether it plays a rollout, or was made inside one."""
    return isinstance(task.get_coro(), _Guarded)


class Exited(Exception):
    """An environment asked the program to end.

    Args:
        error: what it asked with.
    """

    def __init__(self, error: SystemExit | KeyboardInterrupt) -> None:
        super().__init__(readable(f"{type(error).__name__}: {text_of(error)}"))
        self.error = error


def _exit_code(error: BaseException) -> int:
    """That of a process which ends with an exception; with a StopIteration, it returned."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return (error.code or 0) & 0xFF
    return 0 if isinstance(error, StopIteration) else 1


def contain(error: SystemExit | KeyboardInterrupt) -> Never:
    """Raise what a task of a rollout may end with instead.

    Raises:
        Exited: the environment asked for it.
        BaseException: `error` itself, which a signal asked for.
    """
    if _signalled(error):
        raise error
    raise Exited(error) from error


def _signalled(error: SystemExit | KeyboardInterrupt) -> bool:
    """Whether a handler of signals raised it, on top of whatever was running then."""
    if threading.current_thread() is not threading.main_thread():  # handlers are called in that one
        return False
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    if isinstance(error, KeyboardInterrupt) and handlers[0] is signal.default_int_handler:
        return True  # perhaps: it is written in C and leaves no trace
    codes = {_code(handler) for handler in handlers} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code(handler: object) -> object:
    while isinstance(handler, partial):  # asyncio's
        handler = cast("partial[object]", handler).func
    return getattr(handler, "__code__", None)


class _Factory(Protocol):
    """What an event loop makes tasks with; newer Pythons give it more than a context."""

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[object, object, object], /, **options: object
    ) -> asyncio.Future[object]: ...


class _Containing:
    """Makes tasks as before, but those that are made inside a rollout cannot end the program."""

    def __init__(self, earlier: _Factory | None) -> None:
        self.earlier = earlier
        self.rollouts = 0
        self._make = earlier or _made

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[object, object, object], /, **options: object
    ) -> asyncio.Future[object]:
        process = _in_rollout.get()
        if not process or not asyncio.iscoroutine(coro):  # of what is none, a task says so
            return self._make(loop, coro, **options)
        task = self._make(loop, _Guarded(coro, process, running()), **options)
        if (made := _made_inside.get()) is not None:
            made.add(cast("_Task", task))
        return task


def _made(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[object, object, object], /, **options: object
) -> asyncio.Future[object]:
    return asyncio.Task(coro, loop=loop, **options)  # pyright: ignore[reportArgumentType]  they are the loop's own


@contextmanager
def tasks_contained() -> Generator[None]:
    """Inside, tasks that a rollout makes on this event loop are contained. It may be entered many times at once."""
    loop = asyncio.get_running_loop()
    factory: object = loop.get_task_factory()
    if not isinstance(factory, _Containing):
        factory = _Containing(cast("_Factory | None", factory))
        loop.set_task_factory(factory)  # pyright: ignore[reportArgumentType]  typeshed's knows of no context
    factory.rollouts += 1
    try:
        yield
    finally:
        factory.rollouts -= 1
        # An environment may have set another one.
        if not factory.rollouts and cast("object", loop.get_task_factory()) is factory:
            loop.set_task_factory(factory.earlier)  # pyright: ignore[reportArgumentType]  likewise


@asynccontextmanager
async def leftovers_ended() -> AsyncGenerator[None]:
    """Inside, tasks of rollouts are contained; those that are still there at the end are stopped.

    Not earlier: an environment may share a task among its rollouts. Those that clean up have `CLEANING_S` first. One
    that is entered inside another leaves all to that one.
    """
    if _made_inside.get() is not None:
        yield
        return
    made, cleaning = WeakSet[_Task](), set[_Task]()
    before = _made_inside.set(made), _cleaning.set(cleaning)
    with tasks_contained():
        try:
            yield
        finally:
            _made_inside.reset(before[0])
            _cleaning.reset(before[1])
            try:
                if cleaning:
                    await asyncio.wait(cleaning, timeout=CLEANING_S)
            finally:
                await stop(made)


def behind(task: asyncio.Task[None]) -> bool:
    """Let a task that cleans up after a rollout go on when that is over; the end of the run waits for it.

    Returns:
        Whether there is a run to wait for it. Where there is none, the rollout has to.
    """
    cleaning = _cleaning.get()
    if cleaning is None:
        return False
    cleaning.add(cast("_Task", task))
    task.add_done_callback(lambda done: cleaning.discard(cast("_Task", done)))
    return True


async def stop(tasks: Iterable[_Task]) -> bool:
    """Cancel tasks, and whether they ended within `GRACE_S`; those that go on are abandoned.

    Args:
        tasks: may become more while they end.
    """
    clock = asyncio.get_running_loop().time
    until_s, cancelled = clock() + GRACE_S, set[_Task]()
    try:
        while (pending := _pending(tasks)) and (left_s := until_s - clock()) > 0:
            for task in pending - cancelled:
                task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
                task.cancel()
            cancelled |= pending
            await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stuck = _pending(tasks)
        for task in stuck:
            _abandon(task)
    return not stuck


def _pending(tasks: Iterable[_Task]) -> set[_Task]:
    return {task for task in tasks if not task.done()}


def _abandon(task: _Task) -> None:
    """Make sure that nobody waits for a task, not even the event loop at its end."""
    coroutine = task.get_coro()
    assert isinstance(coroutine, Coroutine)  # a task that is not done has one
    try:
        coroutine.close()
    except BaseException:  # it goes on, and once its event loop is gone, being finalized could take it for ever
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
    task.cancel()
    asyncio._unregister_task(task)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage, reportUnknownMemberType]  documented, for those who keep tasks of their own


class _Guarded(Coroutine[object, object, object]):
    """A coroutine that ends with an ordinary exception where it would end the program.

    No `async def`: one that is cancelled before it begins would never await what it was made for, which is a warning.
    """

    def __init__(
        self, coroutine: Coroutine[object, object, object], process: int, stopwatches: Iterable[Stopwatch]
    ) -> None:
        self._coroutine = coroutine
        self._process = process
        self._stopwatches = stopwatches
        self._holds = loop_holds()

    @override
    def send(self, value: object, /) -> object:
        measured = self._holds.begin(self._stopwatches)
        try:
            waits_for = self._coroutine.send(value)
        except BaseException as error:
            self._ended(error)
            raise
        finally:
            if measured:
                self._holds.end()
        if self._process != _process:
            os._exit(1)  # there is no event loop here that it could wait in
        return waits_for

    @override
    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
        /,
    ) -> object:
        measured = self._holds.begin(self._stopwatches)
        try:
            waits_for = self._coroutine.throw(
                typ if isinstance(typ, BaseException) else cast("BaseException", val or typ())
            )
        except BaseException as error:
            self._ended(error)
            raise
        finally:
            if measured:
                self._holds.end()
        if self._process != _process:
            os._exit(1)
        return waits_for

    @override
    def close(self) -> None:
        self._coroutine.close()

    @override
    def __await__(self) -> Generator[object, object, object]:
        return (yield from self._coroutine.__await__())

    def _ended(self, error: BaseException) -> None:
        if self._process != _process:
            os._exit(_exit_code(error))
        if isinstance(error, SystemExit | KeyboardInterrupt):
            contain(error)

    def __getattr__(self, name: str) -> object:  # its name, frame and state, for those who look at tasks
        return getattr(self._coroutine, name)
