"""A worker: a process that plays rollouts and asks the run for completions.

Invariant: each call has one result. The worker ends when the run closes the connection.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import faulthandler
import io
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import redirect_stderr, redirect_stdout, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import BinaryIO, TextIO, cast, override

from rlkit._util.frames import describe_error
from rlkit._util.gc_tuning import rare_garbage_collection
from rlkit._util.loop_holds import loop_holds
from rlkit._util.stopwatch import current_stopwatches, request_wait
from rlkit._util.threads import DaemonThreadPool
from rlkit.config.loading.objects import load_file
from rlkit.env import Task
from rlkit.errors import EnvironmentFault, RlkitError
from rlkit.policy import Sampler, Samplers
from rlkit.rollout.runner import RolloutRunner
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.types import Completion, Prompt, Sampling
from rlkit.workers import messages
from rlkit.workers.marker import Marker
from rlkit.workers.task_pickles import TaskPickle

_START_S = 600.0  # time limit for loading tasks; many workers may import large packages at once from a slow folder
_RENEW_S = 1.0
_PR_SET_PDEATHSIG = 1

_running_call: ContextVar[tuple[int, float] | None] = ContextVar("rlkit_running_call", default=None)
"""Number of the call to which the current asyncio task belongs, and its time limit."""


class Worker:
    """The calls of a worker."""

    def __init__(self, send: Callable[[messages.FromWorker], None]) -> None:
        self.send = send
        self.has_ended = asyncio.Event()
        self._runner: RolloutRunner | None = None
        self._calls = dict[int, asyncio.Task[None]]()
        self._tasks = dict[int, Task | bytes]()
        self._requests = dict[int, RemoteRequest]()
        self._numbers = count(1)

    def receive(self, frame: bytes) -> None:
        """Handle a message of the run."""
        message: messages.ToWorker = pickle.loads(frame)
        match message:
            case messages.Start():
                self._start(message)
            case messages.Play() | messages.Score():
                self._begin(message)
            case messages.Cancel(call):
                if call in self._calls:
                    _cancel_once(self._calls[call])
            case TaskPickle(number, data):
                self._tasks[number] = data
            case messages.Forget(number):
                del self._tasks[number]
            case messages.Answer() | messages.Excuse():
                if message.request in self._requests:
                    self._requests[message.request].hear(message)
            case _:
                self.has_ended.set()

    async def ask(self, make: Callable[[int], messages.Ask]) -> messages.Answer:
        """Send the request that `make` returns for a number, and wait for its answer."""
        ask = make(next(self._numbers))
        request = self._requests[ask.request] = RemoteRequest()
        self.send(ask)
        try:
            with request_wait(request):
                answer = await asyncio.wrap_future(request.answer)  # perhaps on the event loop of a thread
        except asyncio.CancelledError:
            self.send(messages.Withdraw(ask.call, ask.request))
            raise
        finally:
            del self._requests[ask.request]
        if answer.error is not None:
            raise answer.error
        return answer

    async def stop(self) -> None:
        """Cancel all calls, and wait until they have cleaned up."""
        for task in self._calls.values():
            _cancel_once(task)
        if self._calls:
            await asyncio.wait(self._calls.values())

    def _start(self, message: messages.Start) -> None:
        self._runner, problem, place = message.runner, None, ""
        faulthandler.dump_traceback_later(_START_S, exit=True)  # a load that takes too long shows its line
        try:
            for path in message.files:
                load_file(path)
            for name, task in message.tasks:
                place = f"envs.{name}: "
                _load_task(task)
        except RlkitError as error:
            problem = f"{place}{error}"
        faulthandler.cancel_dump_traceback_later()
        self.send(messages.Ready(problem))

    def _begin(self, message: messages.Play | messages.Score) -> None:
        call = message.call
        limit_s = message.timeout_s if isinstance(message, messages.Score) else message.rollout.settings.timeout_s
        token = _running_call.set((call, limit_s))
        task = self._calls[call] = asyncio.create_task(self._answer(message))
        _running_call.reset(token)
        task.add_done_callback(lambda _: self._calls.pop(call))

    async def _answer(self, message: messages.Play | messages.Score) -> None:
        call, value, failure = message.call, None, None
        try:
            value = await self._run(message)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # raised in the run
            failure = messages.as_portable(error)
        try:
            self.send(messages.Result(call, value, failure, time.process_time()))
        except Exception as error:  # a value of the user that cannot be pickled
            fault = EnvironmentFault(f"a result of the worker cannot be pickled: {describe_error(error)}")
            self.send(messages.Result(call, None, fault, time.process_time()))

    async def _run(self, message: messages.Play | messages.Score) -> object:
        assert self._runner is not None  # `Start` is the first message
        task = self._tasks[message.task]
        if isinstance(task, bytes):  # loaded by the first call, whose code it is; the others share it
            task = self._tasks[message.task] = _load_task(task)
        if isinstance(message, messages.Score):
            return await self._runner.score(task, message.episodes, timeout_s=message.timeout_s)
        make_sampler = partial(_RemoteSampler, self, message.call)

        async def make_opponent(weights: int | str, _: object) -> Sampler:
            return make_sampler(weights)

        return await self._runner.play(task, message.rollout, Samplers(make_sampler, make_sampler, make_opponent))


@dataclass(eq=False)
class RemoteRequest:
    """A request that the run forwards to the service; a `Request` of stopwatches."""

    answer: Future[messages.Answer] = field(default_factory=Future[messages.Answer])
    excused_s: float = 0.0
    _silent_since_s: float | None = None

    @property
    def silent_s(self) -> float:
        """Seconds of waiting since the service last answered any request; 0 if it is not silent."""
        return 0.0 if self._silent_since_s is None else loop_holds().now_s - self._silent_since_s

    def hear(self, message: messages.Answer | messages.Excuse) -> None:
        """Receive the answer, or the state of the wait."""
        self.excused_s = message.excused_s
        if isinstance(message, messages.Answer):
            if not self.answer.done():
                self.answer.set_result(message)
        else:
            self._silent_since_s = loop_holds().now_s - message.silent_s


@dataclass(eq=False)
class _RemoteSampler:
    """The newest sampler of a rollout, or that of an opponent, which is in the process of the run."""

    worker: Worker
    call: int
    opponent: int | str | None = None
    version: int = -1  # known from the first answer

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        is_new = self.version < 0
        answer = await self.worker.ask(
            lambda number: messages.Ask(self.call, number, prompt, sampling, seed, num_samples, is_new, self.opponent)
        )
        self.version = answer.version
        return answer.completions


class _EnvOutput(io.TextIOBase):
    """A text stream that sends each line to the run, with the name of the environment that wrote it."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, send: Callable[[messages.Printed], None]) -> None:
        self._send = send
        self._rest = dict[str, str]()

    @override
    def writable(self) -> bool:
        return True

    @override
    def fileno(self) -> int:
        return 1

    @property
    def buffer(self) -> BinaryIO:
        """Binary stream whose lines have no name of an environment."""
        assert sys.__stdout__ is not None
        return cast("BinaryIO", sys.__stdout__.buffer)

    @override
    def write(self, text: str, /) -> int:
        env = next((stopwatch.name for stopwatch in current_stopwatches() if stopwatch.name), "")
        *lines, self._rest[env] = (self._rest.get(env, "") + text).split("\n")
        for line in lines:
            self._send(messages.Printed(env, line))
        return len(text)

    def send_rest(self) -> None:
        """Send lines that have no end."""
        for env, line in self._rest.items():
            if line:
                self._send(messages.Printed(env, line))


def _cancel_once(task: asyncio.Task[None]) -> None:
    if not task.cancelling():  # otherwise its environment is cleaning up
        task.cancel()


def _load_task(data: bytes) -> Task:
    """Return a pickled task; EnvironmentFault if the worker cannot load it."""
    try:
        return cast("Task", pickle.loads(data))
    except BaseException as error:  # unpickling runs the user's code
        raise EnvironmentFault(f"a worker cannot load the task: {describe_error(error)}") from error


class _CallLoop(asyncio.SelectorEventLoop):
    """An event loop that no call can stop."""

    @override
    def stop(self) -> None:
        if _running_call.get() is not None:
            raise EnvironmentFault("an environment must not stop the event loop")
        super().stop()


def _mark_calls(marker: Marker) -> None:
    """Mark the call to which each callback of the event loop belongs, while it runs; end a process that it forks."""
    loop, run, process = asyncio.get_running_loop(), asyncio.Handle._run, os.getpid()

    def run_marked(self: asyncio.Handle) -> None:
        running = cast("contextvars.Context", self._context).get(_running_call)
        if running is None or self._loop is not loop:
            run(self)
            return
        marker.set(*running)
        try:
            run(self)
        except SystemExit as error:  # from a callback; asyncio would cancel the other rollouts and clear the marker
            os._exit(error.code if isinstance(error.code, int) else 1)
        if os.getpid() != process:  # it would go on as a second worker with the connection of the first
            os.write(1, b"a process that the environment forked was ended as it left its code: end it with os._exit\n")
            os._exit(1)
        marker.clear()

    asyncio.Handle._run = run_marked


@stop_leftover_tasks()
async def _serve(connection: socket.socket, marker: Marker) -> None:
    loop, process = asyncio.get_running_loop(), os.getpid()

    def send(message: messages.FromWorker) -> None:  # from any thread
        if asyncio._get_running_loop() is loop:
            protocol.send(messages.encode(message))
        else:
            loop.call_soon_threadsafe(send, message)

    def send_line(message: messages.Printed) -> None:  # from any thread, and from processes that environments fork
        if os.getpid() != process:
            os.write(1, f"{message.line}\n".encode(errors="replace"))
        else:
            send(message)

    def renew_marker() -> None:
        marker.clear()
        loop.call_later(_RENEW_S, renew_marker)

    loop.set_default_executor(DaemonThreadPool())  # the end of the run does not wait for busy threads
    worker = Worker(send)
    protocol = messages.FrameProtocol(worker.receive, lambda _: worker.has_ended.set())
    await loop.create_connection(lambda: protocol, sock=connection)
    renew_marker()
    _mark_calls(marker)
    env_output = _EnvOutput(send_line)
    output = cast("TextIO", env_output)
    with rare_garbage_collection(), redirect_stdout(output), redirect_stderr(output):
        await worker.has_ended.wait()
        await worker.stop()
    env_output.send_rest()


def _refuse_breakpoint(*_: object) -> None:
    raise EnvironmentFault("breakpoint() needs a terminal, which a worker has not: set rollouts.workers to 0")


def main(connection: int, marker: int) -> None:
    """Serve a run over the given file descriptors, until it closes the connection."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # the closed connection ends the worker
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an environment that sends it is to blame
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _refuse_breakpoint
    faulthandler.enable()  # a crash in native code shows its line
    with suppress(OSError):  # the system should end a worker, not the run
        Path("/proc/self/oom_score_adj").write_text("500")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with asyncio.Runner(loop_factory=_CallLoop) as runner:
        runner.run(_serve(socket.socket(fileno=connection), Marker(marker)))
