"""Concurrent coroutines, and threads for blocking calls.

Invariant: rlkit never waits for an environment's threads. Its own blocking calls run on separate threads, and a thread
that never ends prevents neither the event loop nor the process from ending.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import cast, override

_GRACE_S = 3.0  # seconds that a shutdown waits for busy threads; well below the limit of a run's clean-up
PROGRESS_S = 10.0  # seconds between reports of progress of a call


def run[T](main: Coroutine[object, object, T]) -> T:
    """Run a coroutine like `asyncio.run`, on an event loop that does not wait forever for busy threads."""

    async def with_threads() -> T:
        asyncio.get_running_loop().set_default_executor(DaemonThreadPool())
        return await main

    return asyncio.run(with_threads())


class Interruptible:
    """Runner of a coroutine that another thread or a signal handler can cancel.

    An interrupt cancels only the main task. Raising an exception from a signal handler could orphan a process that was
    just started. Cancelling all tasks, including the event loop's own, could make the clean-up wait forever.
    """

    def __init__(self) -> None:
        self._cancel: Callable[[], object] | None = None
        self._cancelled = False

    def run[T](self, main: Coroutine[object, object, T]) -> T:
        """Run a coroutine like `run`. Raises KeyboardInterrupt if `interrupt` cancelled it."""

        async def run_main() -> T:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            try:
                return await main
            finally:
                self._cancel = None

        try:
            return run(run_main())
        except asyncio.CancelledError:
            if self._cancelled:
                raise KeyboardInterrupt from None
            raise

    def interrupt(self) -> None:
        """Cancel the running coroutine. Raises KeyboardInterrupt if none is running."""
        if self._cancel is None:
            raise KeyboardInterrupt
        self._cancelled = True
        self._cancel()


def run_in_new_loop[T](main: Coroutine[object, object, T]) -> T:
    """Run a coroutine to its end on a new event loop in a new thread, because this thread may run an event loop."""
    with ThreadPoolExecutor(1, thread_name_prefix="rlkit-loop") as thread:
        return thread.submit(asyncio.run, main).result()


class DaemonThreadPool(ThreadPoolExecutor):
    """Pool of daemon threads for an event loop, abandoned at shutdown.

    `ThreadPoolExecutor` waits for its threads at shutdown and again when the interpreter ends. It is the base class
    only because an event loop requires a subclass of it.

    Args:
        count: number of threads; by default the same as in asyncio's default pool.
        grace_s: time to finish all work at shutdown; the rest is abandoned.
    """

    def __init__(self, count: int | None = None, *, name: str = "asyncio", grace_s: float = _GRACE_S) -> None:
        self._count = count or min(32, (os.cpu_count() or 1) + 4)
        super().__init__(self._count)
        self._name = name
        self._grace_s = grace_s
        self._pending = deque[tuple[Future[object], Callable[[], object]]]()
        self._changed = threading.Condition()
        self._workers: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    @override
    def submit[**P, T](self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = Future[T]()
        with self._changed:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._idle <= len(self._pending) and len(self._workers) < self._count:
                thread = threading.Thread(target=self._work, name=f"{self._name}_{len(self._workers)}", daemon=True)
                thread.start()
                self._workers.append(thread)
            self._pending.append((cast("Future[object]", future), partial(fn, *args, **kwargs)))
            self._changed.notify()
        return future

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        end_s = time.monotonic() + (self._grace_s if wait else 0)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if cancel_futures:
            self._drop()
        if wait:
            for thread in self._workers:
                thread.join(max(0, end_s - time.monotonic()))
            self._drop()  # a thread that becomes free later must not start anything

    def _drop(self) -> None:
        with self._changed:
            dropped = list(self._pending)
            self._pending.clear()
        for future, _ in dropped:
            future.cancel()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._pending or self._closed)
                self._idle -= 1
                if not self._pending:
                    return
                future, function = self._pending.popleft()
            _call(future, function)
            del future, function  # otherwise they would live until the next call


def _call(future: Future[object], function: Callable[[], object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # re-raised where the future is awaited
        future.set_exception(error)
    finally:
        del future  # the exception's traceback holds this frame


async def run_together[T](coroutines: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order.

    If a coroutine raises, cancel and await the others, and raise its exception, not a group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise flatten_error(failures)[0] from None
    return [task.result() for task in tasks]


def mark_retrieved(task: asyncio.Task[object]) -> None:
    """Mark a finished task's error as retrieved, so that asyncio does not report it; whoever awaits it gets it."""
    if not task.cancelled():
        task.exception()


def start_task[T](coroutine: Coroutine[object, object, T]) -> asyncio.Task[T]:
    """Start a task whose error asyncio does not report, because whoever awaits the task gets it."""
    task = asyncio.create_task(coroutine)
    task.add_done_callback(mark_retrieved)
    return task


def flatten_error(error: BaseException) -> list[BaseException]:
    """Return the errors in a group of errors, and in groups inside it."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    group = cast("BaseExceptionGroup[BaseException]", error)
    return [leaf for inner in group.exceptions for leaf in flatten_error(inner)]


class BlockingCalls:
    """Call blocking functions in threads of their own; arguments as of `DaemonThreadPool`."""

    def __init__(self, count: int, *, name: str) -> None:
        self._pool = cache(partial(DaemonThreadPool, count, name=name))
        os.register_at_fork(after_in_child=self._pool.cache_clear)  # threads do not survive a fork

    async def __call__[*Ts, T](self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function in a thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool(), function, *args)


in_thread = BlockingCalls(8, name="rlkit")
"""The event loop's default threads are reserved for environments: graders that block all of them must not delay the
journal. There are more threads than the store uses, so hanging connections to a service do not block the store."""

in_sandbox_thread = BlockingCalls(32, name="rlkit-sandbox")
"""Separate threads for the blocking calls of sandboxes, so that sandboxes delay only sandboxes."""


def call_within[T](
    call: Callable[[], T], *, timeout_s: float, progress: Callable[[float], None] = lambda seconds: None
) -> T | str:
    """Return the result of a call, or one line about its exception or timeout.

    Args:
        call: function to run in a daemon thread, which is abandoned at the limit. Resolving a host name and reading a
            network folder cannot be cancelled.
        progress: receives the elapsed seconds, every `PROGRESS_S`.
    """
    started_s, pool = time.monotonic(), DaemonThreadPool(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)  # the thread ends with the call
    while not future.done() and (left_s := started_s + timeout_s - time.monotonic()) > 0:
        wait([future], min(left_s, PROGRESS_S))
        if not future.done():
            progress(time.monotonic() - started_s)
    if not future.done():
        return f"no answer within {timeout_s:g} s"
    if (error := future.exception()) is None:
        return future.result()
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}".rstrip(": ")
