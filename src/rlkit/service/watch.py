"""Patience with a service: retries, time limits, and a word to the user when it goes silent.

Invariant: no call waits longer than `timeout_s` for one answer, and none is retried once the service has answered
nothing at all for that long. A request that may be lost is made a second time before that, where it can be.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import override

from rlkit._util.loop_holds import loop_holds
from rlkit._util.stopwatch import Request, request_wait
from rlkit.errors import ServiceError
from rlkit.policy import Sampler
from rlkit.service.patience import Deadlines, NoAnswer, Patience
from rlkit.types import Completion, Prompt, Sampling

SILENCE_S = 45.0
"""After so long without any answer the user is told."""

_LOOK_S = 5.0
_AGAIN_S = 60.0
_AGAIN_MAX_S = 960.0
_BACKOFF_S = 0.5
_BACKOFF_MAX_S = 60.0
_CALM_S = 2 * _BACKOFF_MAX_S


@dataclass(slots=True, eq=False)
class ServiceWatch:
    """Watches over the calls to a service.

    Args:
        note: receives lines for the user.
        timeout_s: limit in seconds of a service's silence.
        seed: seed of the jitter between retries.
        is_computing: says that the service works on an answer; the user is then not told that it is silent.
        last_answer_s: when the service last answered anybody.
    """

    note: Callable[[str], None]
    timeout_s: float
    seed: int = 0
    is_computing: Callable[[], bool] = lambda: False
    _random: Random = field(init=False)
    _deadlines: Deadlines = field(default_factory=Deadlines)
    _open: int = 0
    _waiting: Counter[str] = field(default_factory=Counter[str])
    last_answer_s: float = 0.0
    _silent_s: float = 0.0  # how long the service had answered nobody when the last call failed
    _silences_s: float = 0.0
    _failures: _Notice = field(init=False)
    _silence: _Notice = field(init=False)
    _said: str = ""

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._failures, self._silence = _Notice(self.note), _Notice(self.note)

    async def call[T](self, make: Callable[[], Awaitable[T]], what: str, *, retry: bool = False) -> T:
        """Await an answer.

        Args:
            make: makes the request; called again for each retry.
            what: the thing asked for, such as "sampling".
            retry: the call changes nothing, and can be made again.

        Raises:
            ServiceError: the call failed, or took longer than `timeout_s`.
        """
        clock = _heard_s
        delay, asked_s = _BACKOFF_S, clock()
        if not self._open:
            self.last_answer_s = max(self.last_answer_s, asked_s)  # silence counts from when somebody asks
        self._open += 1
        self._waiting[what] += 1
        request = _Request(self, asked_s)
        again = partial(self._until_it_answers, make, what) if retry else None
        try:
            with request_wait(request):
                while True:
                    try:
                        answer = await Patience(self._deadlines, self.timeout_s, again=again).wait(make(), what)
                        self._answer_came(clock())
                        return answer
                    except ServiceError as error:
                        left_s = self.last_answer_s + self.timeout_s - clock()
                        if not retry or left_s <= 0 or isinstance(error, NoAnswer):
                            raise
                        request.failed = True
                        pause = min(self._random.uniform(0, delay), left_s)  # jitter: clients that fail together part
                        self._failures.tell(f"{error}; trying again")
                        await asyncio.sleep(pause)
                        delay = min(2 * delay, _BACKOFF_MAX_S)
        except ServiceError:
            self._silent_s = clock() - max(self.last_answer_s, asked_s)
            raise
        finally:
            self._open -= 1
            self._waiting[what] -= 1

    def total_silence_s(self, now_s: float) -> float:
        """Seconds of all the times that the service answered nobody for `SILENCE_S` or more, up to now."""
        silent_s = now_s - self.last_answer_s
        return self._silences_s + (silent_s if silent_s >= SILENCE_S and self._open else 0.0)

    @property
    def is_service_gone(self) -> bool:
        """True if the service answered nobody, and not only not the last call that failed.

        One that falls silent has answered others for a while after that call was made: half of the time is enough.
        """
        return self._silent_s >= self.timeout_s / 2

    @asynccontextmanager
    async def watch_silence(self) -> AsyncGenerator[None]:
        """Inside, the user is told when the service is silent."""
        watching = asyncio.create_task(self.notify_of_silence())
        try:
            yield
        finally:
            watching.cancel()

    async def notify_of_silence(self) -> None:
        """Tell the user when the service is silent, for ever; run it beside the work."""
        clock = _heard_s
        with capture_warnings(self._remember):
            while True:
                await asyncio.sleep(_LOOK_S)
                silent_s = clock() - self.last_answer_s
                if self._open and silent_s >= SILENCE_S and not self.is_computing():
                    asked = ", ".join(f"{what} ({count})" for what, count in self._waiting.items() if count)
                    said = f"; the Tinker client says: {self._said}" if self._said else ""
                    self._silence.tell(f"no answer from the service for {silent_s:.0f} s; waiting for: {asked}{said}")

    def _remember(self, warning: str) -> None:
        self._said = warning

    async def _until_it_answers[T](self, make: Callable[[], Awaitable[T]], what: str) -> T:
        """Beside the first request, which may only be slow; but it may also be lost."""
        self._failures.tell(f"{what}: no answer yet; asking once more, in case the request was lost")
        delay = _BACKOFF_S
        while True:
            try:
                return await make()
            except ServiceError as error:
                self._failures.tell(f"{error}; trying again")
                await asyncio.sleep(self._random.uniform(0, delay))
                delay = min(2 * delay, _BACKOFF_MAX_S)

    def _answer_came(self, now_s: float) -> None:
        self._silences_s = self.total_silence_s(now_s)
        self.last_answer_s = now_s
        self._silent_s = 0.0


def _heard_s() -> float:
    """The time in which answers could be heard: nobody hears while a rollout holds the event loop."""
    return loop_holds().now_s


@dataclass(slots=True, eq=False)
class _Notice:
    """A kind of trouble that the user is told of, less and less often while it goes on, whatever else goes well."""

    note: Callable[[str], None]
    _told_s: float = -math.inf
    _met_s: float = -math.inf
    _again_s: float = 0.0

    def tell(self, message: str) -> None:
        """Say it, unless something like it was said a moment ago."""
        now = asyncio.get_running_loop().time()
        if now - self._met_s >= _CALM_S:  # the trouble was over: this is another
            self._again_s = 0.0
        self._met_s = now
        if now - self._told_s >= self._again_s:
            self._told_s = now
            self._again_s = min(max(2 * self._again_s, _AGAIN_S), _AGAIN_MAX_S)
            self.note(message)


class _Request(Request):
    """A call that is not answered yet; of one that failed, all the time that it is made again is the service's fault.

    Where the service answers others and this one never, that ends after `timeout_s`, so that no rollout is immortal.
    """

    __slots__ = ("_asked_s", "_silences_s", "_watch", "failed")

    def __init__(self, watch: ServiceWatch, asked_s: float) -> None:
        self._watch = watch
        self._asked_s = asked_s
        self._silences_s = watch.total_silence_s(asked_s)
        self.failed = False

    @property
    def excused_s(self) -> float:
        now_s = _heard_s()
        excused_s = self._watch.timeout_s if self.failed else self._watch.total_silence_s(now_s) - self._silences_s
        return min(now_s - self._asked_s, excused_s)

    @property
    def silent_s(self) -> float:
        return _heard_s() - max(self._asked_s, self._watch.last_answer_s)


@dataclass(frozen=True, slots=True, eq=False)
class PatientSampler:
    """A sampler whose requests are watched over and retried.

    Args:
        sampler: the sampler that is asked.
        watch: the watch over its service.
        version: number of the weights in the run, whatever `sampler` calls them.
    """

    sampler: Sampler
    watch: ServiceWatch
    version: int

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        """Draw completions of one prompt, as `Sampler.sample` does."""

        def request() -> Awaitable[Sequence[Completion]]:
            return self.sampler.sample(prompt, sampling, seed=seed, num_samples=num_samples)

        while True:
            try:
                return await self.watch.call(request, "sampling", retry=True)
            except NoAnswer:  # while others are answered, the rollout's own time limit ends this
                if self.watch.is_service_gone:
                    raise


class _Listener(logging.Handler):
    def __init__(self, remember: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._remember = remember

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._remember(record.getMessage().splitlines()[0])


@contextmanager
def capture_warnings(remember: Callable[[str], None]) -> Generator[None]:
    """Give `remember` the first line of each warning of the client library, such as that a queue is paused."""
    listener = _Listener(remember)
    logging.getLogger("tinker").addHandler(listener)
    try:
        yield
    finally:
        logging.getLogger("tinker").removeHandler(listener)
