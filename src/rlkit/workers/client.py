"""The run's side of a worker: send it calls, and answer its requests for completions.

Invariant: a call ends with its result, or with the loss of its worker. A request of a worker is answered once.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, override

from rlkit._util.stopwatch import Request, Stopwatch, use_stopwatches
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.policy import NO_OPPONENTS, Sampler, Samplers
from rlkit.rollout.task_guard import GRACE_S
from rlkit.workers import messages
from rlkit.workers.connection import Connect, WorkerLoss, WorkerOwner
from rlkit.workers.task_pickles import TaskPickle

_EXCUSE_EVERY_S = 1.0
_RAW_CHARACTERS = 500
_SILENT_S = 2.0
"""Seconds of the service's silence from which workers are told about it; a busy service answers more often."""


class WorkerLost(Exception):
    """The worker of a call ended: because of the call, perhaps because of it, or certainly not."""

    def __init__(self, reason: str, *, cause: Literal["yes", "perhaps", "no"]) -> None:
        super().__init__(reason)
        self.cause = cause


class _WaitProbe(Stopwatch):
    """A stopwatch that only remembers the request that its rollout waits for, to tell the worker."""

    def __init__(self) -> None:
        super().__init__()
        self.request: Request | None = None

    @override
    def start_wait(self, request: Request) -> None:
        self.request = request

    @override
    def end_wait(self, request: Request) -> None:
        pass  # keep the request: its excused seconds go into the answer


@dataclass(slots=True, eq=False)
class _Call:
    """An unfinished call of a worker."""

    result: asyncio.Future[messages.Result]
    samplers: Samplers | None  # None for the scores of a group
    sampler: Sampler | None = None  # sampler of the last turn
    requests: dict[int, tuple[asyncio.Task[None], _WaitProbe]] = field(
        default_factory=dict[int, "tuple[asyncio.Task[None], _WaitProbe]"]
    )


class WorkerClient(WorkerOwner):
    """A running worker.

    Args:
        start: frame of the first message.
        print_line: receives each line that the worker prints, with the name of the environment or "".
        replace: called once if the worker ends by itself.
    """

    def __init__(
        self,
        connect: Connect,
        start: bytes,
        *,
        print_line: Callable[[str, str], None],
        replace: Callable[[WorkerClient], None],
    ) -> None:
        self.cpu_s = 0.0  # processor time of the worker, as of its last result
        self._print_line = print_line
        self._replace = replace
        self._calls = dict[int, _Call]()
        self._tasks = Counter[int]()  # number of unfinished calls of each task
        self._number = 0
        self.ready = asyncio.get_running_loop().create_future()
        """Done when the worker can play; has the UsageError if it cannot."""
        self._raw_lines = deque[str](maxlen=40)
        self._connection = connect(self)
        self._connection.send(start)
        self._excusing = asyncio.create_task(self._send_excuses())

    @property
    def load(self) -> int:
        """Number of unfinished calls."""
        return len(self._calls)

    @property
    def computing(self) -> int:
        """Number of unfinished calls that do not wait for completions."""
        return sum(not call.requests for call in self._calls.values())

    async def call(
        self, message: messages.Play | messages.Score, task: TaskPickle, samplers: Samplers | None
    ) -> object:
        """Send a call, and return its result.

        Args:
            task: sent before the first of the unfinished calls that have it.

        Raises:
            WorkerLost: the worker ended.
            RlkitError: error of the call.
        """
        self._number += 1
        number = self._number
        call = self._calls[number] = _Call(asyncio.get_running_loop().create_future(), samplers)
        if not self._tasks[task.number]:
            self._connection.send(messages.encode(task))
        self._tasks[task.number] += 1
        try:
            self._connection.send(messages.encode(message._replace(call=number)))
            result = await asyncio.shield(call.result)
        except asyncio.CancelledError:
            self._connection.send(messages.encode(messages.Cancel(number)))
            await asyncio.wait([call.result], timeout=2 * GRACE_S)  # the environment cleans up
            raise
        finally:
            del self._calls[number]
            self._tasks[task.number] -= 1
            if not self._tasks[task.number]:
                del self._tasks[task.number]
                self._connection.send(messages.encode(messages.Forget(task.number)))
            for request, _ in call.requests.values():
                request.cancel()
            if call.result.done() and not call.result.cancelled():
                call.result.exception()
        if result.error is not None:
            raise result.error
        if result.value is None:
            raise WorkerLost("a rollout in the worker process cancelled all rollouts", cause="perhaps")
        return result.value

    async def close(self) -> None:
        """Let the worker clean up, and end it."""
        self._excusing.cancel()
        await self._connection.close()

    def receive(self, frame: bytes, /) -> None:  # noqa: D102  inherited
        message: messages.FromWorker = pickle.loads(frame)
        match message:
            case messages.Ready(problem):
                if problem is None:
                    self.ready.set_result(None)
                else:
                    self._fail_start(problem)
            case messages.Ask():
                if message.call in self._calls:
                    self._begin_request(self._calls[message.call], message)
            case messages.Withdraw(number, request):
                call = self._calls.get(number)
                if call is not None and request in call.requests:
                    call.requests[request][0].cancel()
            case messages.Result():
                self.cpu_s = message.cpu_s
                call = self._calls.get(message.call)
                if call is not None and not call.result.done():
                    call.result.set_result(message)
            case messages.Printed(env, line):
                self._print_line(env, line)

    def _begin_request(self, call: _Call, ask: messages.Ask) -> None:
        probe = _WaitProbe()
        task = asyncio.create_task(self._answer(call, ask, probe))  # without a stopwatch: it is no task of a rollout
        call.requests[ask.request] = task, probe
        task.add_done_callback(lambda _: call.requests.pop(ask.request, None))

    async def _answer(self, call: _Call, ask: messages.Ask, probe: _WaitProbe) -> None:
        assert call.samplers is not None  # scores need no completions
        error, completions, version = None, (), -1
        first, later, opponents = call.samplers
        try:
            with use_stopwatches([probe]):
                if ask.opponent is not None:
                    if opponents is None:
                        raise EnvironmentFault(NO_OPPONENTS)
                    sampler = await opponents(ask.opponent, later)
                elif call.sampler is None or ask.is_new_turn:
                    sampler = call.sampler = first() if call.sampler is None else later()
                else:
                    sampler = call.sampler
                version = sampler.version
                completions = await sampler.sample(ask.prompt, ask.sampling, seed=ask.seed, num_samples=ask.num_samples)
        except Exception as failure:  # raised in the worker, and from there in the call's result
            error = messages.as_portable(failure)
        excused_s = 0.0 if probe.request is None else probe.request.excused_s
        self._connection.send(messages.encode(messages.Answer(ask.request, completions, version, excused_s, error)))

    async def _send_excuses(self) -> None:
        """Tell the worker about requests that wait because of the service."""
        while True:
            await asyncio.sleep(_EXCUSE_EVERY_S)
            for call in self._calls.values():
                for number, (_, probe) in call.requests.items():
                    request = probe.request
                    if request is not None and (request.silent_s > _SILENT_S or request.excused_s):
                        self._connection.send(
                            messages.encode(messages.Excuse(number, request.excused_s, request.silent_s))
                        )

    def lose(self, loss: WorkerLoss, /) -> None:  # noqa: D102  inherited
        self._excusing.cancel()
        has_started = self.ready.done()
        if not has_started:
            output = "".join(f"\n  {line[:_RAW_CHARACTERS]}" for line in self._raw_lines)
            self._fail_start(f"{loss.reason} while it started" + (output and f"; its output:{output}"))
        is_known = loss.culprit is None or loss.culprit in self._calls  # otherwise a thread or a process, perhaps
        for number, call in self._calls.items():
            is_suspect = has_started and not is_known and not call.requests
            cause = "yes" if number == loss.culprit else "perhaps" if is_suspect else "no"
            if not call.result.done():
                call.result.set_exception(WorkerLost(loss.reason, cause=cause))
        self._replace(self)

    def _fail_start(self, problem: str) -> None:
        self.ready.set_exception(UsageError(problem))
        self.ready.exception()  # retrieved, in case nobody waits

    def show(self, line: str, /) -> None:  # noqa: D102  inherited
        self._raw_lines.append(line)
        self._print_line("", line)
