"""Supervise the requests to a service: retries, time limits, and notes to the user while it is silent.

Invariant: no request waits longer than `timeout_s` for an answer, and no request is retried once the service has been
silent for `timeout_s`. A possibly lost request is repeated earlier if it is repeatable.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random

from rlkit._util.deadlines import AnswerWait, Deadlines, NoAnswer
from rlkit._util.loop_holds import LoopHolds, loop_holds
from rlkit._util.stopwatch import Request, request_wait
from rlkit.errors import ServiceError
from rlkit.policy import Sampler
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
    """Supervisor of the requests to a service."""

    note: Callable[[str], None]  # receives lines for the user
    timeout_s: float  # limit in seconds of the service's silence
    seed: int = 0  # seed of the jitter between retries
    is_computing: Callable[[], bool] = lambda: False  # returns whether the service computes, so silence is no problem
    _random: Random = field(init=False)
    _deadlines: Deadlines = field(default_factory=Deadlines)
    _open: Counter[str] = field(default_factory=Counter[str])
    last_answer_s: float = 0.0  # time of the last answer to any request
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
            make: sends the request; called again for each retry.
            activity: phrase for messages, such as "sampling".
            retry: the request has no side effects and may be repeated.

        Raises:
            ServiceError: the request failed, or took longer than `timeout_s`.
        """
        holds, delays = loop_holds(), self._delays()
        started_s = holds.now_s
        if not self._open.total():
            self.last_answer_s = max(self.last_answer_s, started_s)  # silence counts from the first open request
        self._open[activity] += 1
        request = _Request(self, holds, started_s)
        repeat = partial(self._repeat, make, activity) if retry else None
        try:
            with request_wait(request):
                while True:
                    try:
                        wait = AnswerWait(self._deadlines, self.timeout_s, repeat=repeat)
                        answer = await wait.wait(make(), activity)
                        self._hear_answer(holds.now_s)
                        return answer
                    except ServiceError as error:
                        left_s = self.last_answer_s + self.timeout_s - holds.now_s
                        if not retry or left_s <= 0 or isinstance(error, NoAnswer):
                            raise
                        request.has_failed = True
                        pause_s = min(next(delays), left_s)
                        self._failures.add(f"{error}; retrying")
                        await asyncio.sleep(pause_s)
        except ServiceError:
            self._last_silence_s = holds.now_s - max(self.last_answer_s, started_s)
            raise
        finally:
            self._open[activity] -= 1

    def total_silence_s(self, now_s: float) -> float:
        """Return the total seconds of silences that lasted at least `SILENCE_S`, up to `now_s`."""
        silence_s = now_s - self.last_answer_s
        return self._past_silence_s + (silence_s if silence_s >= SILENCE_S and self._open.total() else 0.0)

    @property
    def is_service_gone(self) -> bool:
        """True if the last call failed and the service was silent for at least half of `timeout_s` before.

        Half, because the service may have answered other requests after that call was made.
        """
        return self._last_silence_s >= self.timeout_s / 2

    @asynccontextmanager
    async def watch_silence(self) -> AsyncGenerator[None]:
        """Report silences of the service while the context is open."""
        watching = asyncio.create_task(self.note_silences())
        try:
            yield
        finally:
            watching.cancel()

    async def note_silences(self) -> None:
        """Report silences of the service, for ever."""
        while True:
            await asyncio.sleep(_CHECK_S)
            silence_s = loop_holds().now_s - self.last_answer_s
            if self._open.total() and silence_s >= SILENCE_S and not self.is_computing():
                waits = ", ".join(f"{activity} ({count})" for activity, count in self._open.items() if count)
                warning = f"; the Tinker client says: {self._last_warning}" if self._last_warning else ""
                self._silence.add(f"no answer from the service for {silence_s:.0f} s; waiting for: {waits}{warning}")

    def remember_warning(self, warning: str) -> None:
        """Remember the last warning of the service's client, for notes about silences."""
        self._last_warning = warning

    async def _repeat[T](self, make: Callable[[], Awaitable[T]], activity: str) -> T:
        """Repeat a request until it is answered, because the first request may be slow or lost."""
        self._failures.add(f"{activity}: no answer yet; repeating the request, in case it was lost")
        delays = self._delays()
        while True:
            try:
                return await make()
            except ServiceError as error:
                self._failures.add(f"{error}; retrying")
                await asyncio.sleep(next(delays))

    def _delays(self) -> Iterator[float]:
        """Yield exponential delays with full jitter, so clients that fail together spread out."""
        delay_s = _BACKOFF_S
        while True:
            yield self._random.uniform(0, delay_s)
            delay_s = min(2 * delay_s, _BACKOFF_MAX_S)

    def _hear_answer(self, now_s: float) -> None:
        self._past_silence_s = self.total_silence_s(now_s)
        self.last_answer_s = now_s
        self._last_silence_s = 0.0


@dataclass(slots=True, eq=False)
class _Notice:
    """Rate-limited notes about one kind of problem: less often while the problem continues."""

    note: Callable[[str], None]
    _noted_s: float = -math.inf
    _last_s: float = -math.inf
    _pause_s: float = 0.0

    def add(self, message: str) -> None:
        """Send a message to the user, unless the pause after the last message is not over."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._last_s >= _CALM_S:  # a new problem
            self._pause_s = 0.0
        self._last_s = now_s
        if now_s - self._noted_s >= self._pause_s:
            self._noted_s = now_s
            self._pause_s = min(max(2 * self._pause_s, _NOTE_AGAIN_S), _NOTE_AGAIN_MAX_S)
            self.note(message)


class _Request(Request):
    """An unanswered request. After a failure, the time of its retries is excused, up to `timeout_s`.

    The bound ends a rollout whose request is never answered while the service answers others.
    """

    __slots__ = ("_holds", "_past_silence_s", "_started_s", "_watch", "has_failed")

    def __init__(self, watch: ServiceWatch, holds: LoopHolds, started_s: float) -> None:
        self._watch = watch
        self._holds = holds
        self._started_s = started_s
        self._past_silence_s = watch.total_silence_s(started_s)
        self.has_failed = False

    @property
    def excused_s(self) -> float:
        now_s = self._holds.now_s
        silence_s = self._watch.total_silence_s(now_s) - self._past_silence_s
        return min(now_s - self._started_s, self._watch.timeout_s if self.has_failed else silence_s)

    @property
    def silent_s(self) -> float:
        return self._holds.now_s - max(self._started_s, self._watch.last_answer_s)


@dataclass(frozen=True, slots=True, eq=False)
class PatientSampler:
    """A sampler whose requests are supervised and retried."""

    sampler: Sampler
    watch: ServiceWatch
    version: int  # version of the weights in the run; `sampler.version` may differ

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        """Draw completions of one prompt, as `Sampler.sample` does."""
        request = partial(self.sampler.sample, prompt, sampling, seed=seed, num_samples=num_samples)
        while True:
            try:
                return await self.watch.call(request, "sampling", retry=True)
            except NoAnswer:  # the rollout's time limit ends this loop while other requests are answered
                if self.watch.is_service_gone:
                    raise
