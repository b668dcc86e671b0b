"""Keeping a rollout's exits to itself.

Invariant: SystemExit and KeyboardInterrupt out of a rollout, or out of any task that was made inside one, end as an
ordinary exception: asyncio would end the whole program with them. What a signal asks for goes through.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import traceback
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Never, Protocol, cast, override

from rlkit.plain import readable, text_of

_in_rollout: ContextVar[bool] = ContextVar("rlkit_in_rollout", default=False)


def begin() -> None:
    """Say that this task plays a rollout, and so does all that it makes."""
    _in_rollout.set(True)


class Exited(Exception):
    """An environment asked the program to end.

    Args:
        error: what it asked with.
    """

    def __init__(self, error: SystemExit | KeyboardInterrupt) -> None:
        super().__init__(readable(f"{type(error).__name__}: {text_of(error)}"))
        self.error = error


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
        inside = _in_rollout.get() and asyncio.iscoroutine(coro)  # of what is none, a task says so
        return self._make(loop, _Guarded(coro) if inside else coro, **options)


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


class _Guarded(Coroutine[object, object, object]):
    """A coroutine that ends with an ordinary exception where it would end the program.

    No `async def`: one that is cancelled before it begins would never await what it was made for, which is a warning.
    """

    def __init__(self, coroutine: Coroutine[object, object, object]) -> None:
        self._coroutine = coroutine

    @override
    def send(self, value: object, /) -> object:
        try:
            return self._coroutine.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            contain(error)

    @override
    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
        /,
    ) -> object:
        try:
            return self._coroutine.throw(typ if isinstance(typ, BaseException) else cast("BaseException", val or typ()))
        except (SystemExit, KeyboardInterrupt) as error:
            contain(error)

    @override
    def close(self) -> None:
        self._coroutine.close()

    @override
    def __await__(self) -> Generator[object, object, object]:
        try:
            return (yield from self._coroutine.__await__())
        except (SystemExit, KeyboardInterrupt) as error:
            contain(error)

    def __getattr__(self, name: str) -> object:  # its name, frame and state, for those who look at tasks
        return getattr(self._coroutine, name)
