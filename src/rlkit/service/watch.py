"""Watch over the requests to a service: retries, time limits, and notes to the user while it is silent.

Invariant: no request waits longer than `timeout_s` for an answer, and none is retried once the service has answered
nothing at all for that long. A request that may be lost is repeated before that, if it can be.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import override

from rlkit._util.loop_holds import loop_holds
from rlkit._util.stopwatch import Request, request_wait
from rlkit.errors import ServiceError
from rlkit.policy import Sampler
from rlkit.service.deadlines import AnswerWait, Deadlines, NoAnswer
from rlkit.types import Completion, Prompt, Sampling

SILENCE_S = 45.0
"""Seconds without any answer after which the user gets a note."""

_CHECK_S = 5.0
_NOTE_AGAIN_S = 60.0
_NOTE_AGAIN_MAX_S = 960.0
_BACKOFF_S = 0.5
_BACKOFF_MAX_S = 60.0
_CALM_S = 2 * _BACKOFF_MAX_S


@dataclass(slots=True, eq=False)
class ServiceWatch:
    """A watch over the requests to a service.

    Args:
        note: receives lines for the user.
        timeout_s: limit in seconds of a service's silence.
        seed: seed of the jitter between retries.
        is_computing: returns whether the service works on an answer; its silence is then not noted.
        last_answer_s: time at which the service last answered any request.
    """

    note: Callable[[str], None]
    timeout_s: float
    seed: int = 0
    is_computing: Callable[[], bool] = lambda: False
    _random: Random = field(init=False)
    _deadlines: Deadlines = field(default_factory=Deadlines)
    _open: Counter[str] = field(default_factory=Counter[str])
    last_answer_s: float = 0.0
    _last_silence_s: float = 0.0  # length of the service's silence when the last call failed
    _past_silence_s: float = 0.0
    _failures: _Notice = field(init=False)
    _silence: _Notice = field(init=False)
    _last_warning: str = ""

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._failures, self._silence = _Notice(self.note), _Notice(self.note)

    async def call[T](self, make: Callable[[], Awaitable[T]], activity: str, *, retry: bool = False) -> T:
        """Await an answer.

        Args:
            make: makes the request; called again for each retry.
            activity: phrase for messages, such as "sampling".
            retry: the request changes nothing, and can be repeated.

        Raises:
            ServiceError: the request failed, or took longer than `timeout_s`.
        """
        started_s, delays = _audible_s(), self._delays()
        if not self._open.total():
            self.last_answer_s = max(self.last_answer_s, started_s)  # silence counts from the first open request
        self._open[activity] += 1
        request = _Request(self, started_s)
        repeat = partial(self._repeat, make, activity) if retry else None
        try:
            with request_wait(request):
                while True:
                    try:
                        wait = AnswerWait(self._deadlines, self.timeout_s, repeat=repeat)
                        answer = await wait.wait(make(), activity)
                        self._hear_answer(_audible_s())
                        return answer
                    except ServiceError as error:
                        left_s = self.last_answer_s + self.timeout_s - _audible_s()
                        if not retry or left_s <= 0 or isinstance(error, NoAnswer):
                            raise
                        request.has_failed = True
                        pause_s = min(next(delays), left_s)
                        self._failures.add(f"{error}; trying again")
                        await asyncio.sleep(pause_s)
        except ServiceError:
            self._last_silence_s = _audible_s() - max(self.last_answer_s, started_s)
            raise
        finally:
            self._open[activity] -= 1

    def total_silence_s(self, now_s: float) -> float:
        """Return the seconds of all silences of `SILENCE_S` or more, up to now."""
        silence_s = now_s - self.last_answer_s
        return self._past_silence_s + (silence_s if silence_s >= SILENCE_S and self._open.total() else 0.0)

    @property
    def is_service_gone(self) -> bool:
        """True if the last call failed while the service answered no other request either.

        A service that falls silent may have answered others after that call was made: half of the time is enough.
        """
        return self._last_silence_s >= self.timeout_s / 2

    @asynccontextmanager
    async def watch_silence(self) -> AsyncGenerator[None]:
        """Note silences of the service while the context is open."""
        watching = asyncio.create_task(self.note_silences())
        try:
            yield
        finally:
            watching.cancel()

    async def note_silences(self) -> None:
        """Note silences of the service, for ever."""
        with capture_warnings(self._remember):
            while True:
                await asyncio.sleep(_CHECK_S)
                silence_s = _audible_s() - self.last_answer_s
                if self._open.total() and silence_s >= SILENCE_S and not self.is_computing():
                    waits = ", ".join(f"{activity} ({count})" for activity, count in self._open.items() if count)
                    warning = f"; the Tinker client says: {self._last_warning}" if self._last_warning else ""
                    self._silence.add(
                        f"no answer from the service for {silence_s:.0f} s; waiting for: {waits}{warning}"
                    )

    def _remember(self, warning: str) -> None:
        self._last_warning = warning

    async def _repeat[T](self, make: Callable[[], Awaitable[T]], activity: str) -> T:
        """Repeat a request until it is answered: the first one may be slow, but it may also be lost."""
        self._failures.add(f"{activity}: no answer yet; repeating the request, in case it was lost")
        delays = self._delays()
        while True:
            try:
                return await make()
            except ServiceError as error:
                self._failures.add(f"{error}; trying again")
                await asyncio.sleep(next(delays))

    def _delays(self) -> Iterator[float]:
        """Yield growing delays with jitter, so that clients that fail together spread out."""
        delay_s = _BACKOFF_S
        while True:
            yield self._random.uniform(0, delay_s)
            delay_s = min(2 * delay_s, _BACKOFF_MAX_S)

    def _hear_answer(self, now_s: float) -> None:
        self._past_silence_s = self.total_silence_s(now_s)
        self.last_answer_s = now_s
        self._last_silence_s = 0.0


def _audible_s() -> float:
    """Return the time in which answers could be heard, without that for which a rollout held the event loop."""
    return loop_holds().now_s


@dataclass(slots=True, eq=False)
class _Notice:
    """Notes about one kind of trouble, less and less often while it goes on."""

    note: Callable[[str], None]
    _noted_s: float = -math.inf
    _last_s: float = -math.inf
    _pause_s: float = 0.0

    def add(self, message: str) -> None:
        """Note a message, unless there was a similar one a moment ago."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._last_s >= _CALM_S:  # the trouble was over: this is another
            self._pause_s = 0.0
        self._last_s = now_s
        if now_s - self._noted_s >= self._pause_s:
            self._noted_s = now_s
            self._pause_s = min(max(2 * self._pause_s, _NOTE_AGAIN_S), _NOTE_AGAIN_MAX_S)
            self.note(message)


class _Request(Request):
    """A request without an answer yet. Once it has failed, all the time of its retries is the service's fault.

    If the service answers others and this one never, that ends after `timeout_s`, so that no rollout is immortal.
    """

    __slots__ = ("_past_silence_s", "_started_s", "_watch", "has_failed")

    def __init__(self, watch: ServiceWatch, started_s: float) -> None:
        self._watch = watch
        self._started_s = started_s
        self._past_silence_s = watch.total_silence_s(started_s)
        self.has_failed = False

    @property
    def excused_s(self) -> float:
        now_s = _audible_s()
        silence_s = self._watch.total_silence_s(now_s) - self._past_silence_s
        return min(now_s - self._started_s, self._watch.timeout_s if self.has_failed else silence_s)

    @property
    def silent_s(self) -> float:
        return _audible_s() - max(self._started_s, self._watch.last_answer_s)


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


class _WarningHandler(logging.Handler):
    def __init__(self, receive: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._receive = receive

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._receive(record.getMessage().splitlines()[0])


@contextmanager
def capture_warnings(receive: Callable[[str], None]) -> Generator[None]:
    """Pass on the first line of each warning of the client library, such as that a queue is paused."""
    logger, handler = logging.getLogger("tinker"), _WarningHandler(receive)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
