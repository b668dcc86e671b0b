"""One rollout at the boundary where an environment's faults become data.

Invariant: whatever an environment does, playing it ends: with an outcome, or with a line that says why there is none.
It ends alone, even if one of the tasks that the environment made asks the program to end. What the service or the
configuration did wrong is raised, and so is what a signal asks for.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import traceback
from collections.abc import Coroutine, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Never, Protocol, cast, override

from rlkit.env import Env
from rlkit.errors import LimitReached, MissingError, RewardError, ServiceError, UsageError
from rlkit.outcomes import as_outcome
from rlkit.plain import readable, text_of
from rlkit.policy import RecordingPolicy
from rlkit.stopwatch import Stopwatch, timed_by
from rlkit.types import Outcome

GRACE_S = 3.0
"""What a rollout may take to end once it is cancelled; well under what the whole run may take then."""


async def outcome_of(env: Env, policy: RecordingPolicy, *, timeout_s: float) -> tuple[Outcome | None, str | None]:
    """Play an environment; its outcome, or why it failed.

    Args:
        env: is played.
        policy: with this.
        timeout_s: that it may take, as `Stopwatch` counts them.

    Raises:
        ServiceError: the service failed after retries.
        UsageError: the environment and the model do not fit together.
        MissingError: something that has to be installed is not there.
    """
    stopwatch = Stopwatch()
    stopped = True
    with _tasks_contained():
        # A task of its own, or it could cancel the group's.
        playing = asyncio.create_task(_awaited(env, policy, stopwatch))
        try:
            late = await stopwatch.reaches(timeout_s, playing)
        finally:
            if not playing.done():
                stopped = await _stop(playing)
    took_long = f"the rollout took longer than {timeout_s:g} s (timeout_s)"
    if late:
        return None, took_long if stopped else f"{took_long} and ignored its cancellation"
    try:
        result = playing.result()
        if stopwatch.played_s > timeout_s:  # it held the event loop, so that nothing could interrupt it
            return None, took_long
        return as_outcome(result, of=type(env).__name__), None
    except (ServiceError, UsageError, MissingError, KeyboardInterrupt):  # the last is a signal's
        raise
    except asyncio.CancelledError:
        return None, "the environment cancelled its own rollout"
    except BaseException as error:  # an environment may raise anything; the record says what
        if (ours := _ours(error)) is not None:
            raise ours from error
        return None, _described(error)


async def _stop(playing: asyncio.Task[object]) -> bool:
    """Cancel a rollout, and whether it ended; one that goes on is abandoned."""
    playing.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    playing.cancel()
    try:
        await asyncio.wait([playing], timeout=GRACE_S)
    finally:
        if stuck := not playing.done():
            _abandon(playing)
    return not stuck


def _abandon(playing: asyncio.Task[object]) -> None:
    """Make sure that nobody waits for a rollout, not even the event loop at its end."""
    coroutine = playing.get_coro()
    assert isinstance(coroutine, Coroutine)  # `create_task` was given one
    with suppress(BaseException):  # whatever it has to say about that
        coroutine.close()
    playing.cancel()
    asyncio._unregister_task(playing)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage, reportUnknownMemberType]  documented, for those who keep tasks of their own


async def _awaited(env: Env, policy: RecordingPolicy, stopwatch: Stopwatch) -> object:
    _in_rollout.set(True)  # of this task, and of all that it makes
    with timed_by([stopwatch]):
        try:
            playing: object = env.rollout(policy)
            if not inspect.isawaitable(playing):
                raise RewardError(f"{type(env).__name__}.rollout is an ordinary function; write `async def rollout`")
            return await playing
        except (SystemExit, KeyboardInterrupt) as error:
            _contain(error)


_in_rollout: ContextVar[bool] = ContextVar("rlkit_in_rollout", default=False)


class _Exited(Exception):
    """An environment asked the program to end; a task that lets that through does end it."""

    def __init__(self, error: SystemExit | KeyboardInterrupt) -> None:
        super().__init__(_described(error))


def _contain(error: SystemExit | KeyboardInterrupt) -> Never:
    """Raise what a task of a rollout may end with instead."""
    if _signalled(error):
        raise error
    raise _Exited(error) from error


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
def _tasks_contained() -> Generator[None]:
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
        if (
            not factory.rollouts and cast("object", loop.get_task_factory()) is factory
        ):  # an environment may have set another one
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
            _contain(error)

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
            _contain(error)

    @override
    def close(self) -> None:
        self._coroutine.close()

    @override
    def __await__(self) -> Generator[object, object, object]:
        try:
            return (yield from self._coroutine.__await__())
        except (SystemExit, KeyboardInterrupt) as error:
            _contain(error)

    def __getattr__(self, name: str) -> object:  # its name, frame and state, for those who look at tasks
        return getattr(self._coroutine, name)


def _ours(error: BaseException) -> BaseException | None:
    """What is not the environment's fault, among what its tasks raised."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, ServiceError | UsageError | MissingError) else None
    group = cast("BaseExceptionGroup[BaseException]", error)
    return next((found for inner in group.exceptions if (found := _ours(inner)) is not None), None)


def _described(error: BaseException) -> str:
    match error:
        case RewardError():
            return text_of(error)
        case LimitReached():
            return f"{text_of(error)}; an environment that catches rlkit.LimitReached can grade what is there"
        case _Exited():
            return str(error)
        case BaseExceptionGroup():  # a line has room for one
            return _described(error.exceptions[0])
        case _:
            frames = traceback.extract_tb(error.__traceback__)
            where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            return readable(f"{type(error).__name__}: {text_of(error)}{where}")
