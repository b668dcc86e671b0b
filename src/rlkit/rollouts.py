"""Playing groups: concurrency, time limits, failures.

Invariant: every episode that is started ends in exactly one record. What an environment does wrong becomes a failed
episode, never a reward and never a crash of the run; what the service does wrong is not blamed on the environment.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlkit.chat import ChatFormat
from rlkit.concurrency import together
from rlkit.env import Env
from rlkit.errors import LimitReached, MissingError, RewardError, ServiceError, UsageError
from rlkit.outcomes import as_outcome
from rlkit.policy import Limits, RecordingPolicy, Sampler
from rlkit.seeds import derive
from rlkit.sources import Task
from rlkit.types import Episode, Group, Outcome, Sampling


@dataclass(frozen=True, slots=True)
class EnvSettings:
    """How one environment of a run is played.

    Args:
        group_size: rollouts of one task.
        sampling: how completions are drawn.
        timeout_s: of one rollout, from when it begins to play.
        max_failing_rollouts: failed episodes of a group that are played again.
        limits: turns and context that one rollout may use.
    """

    group_size: int
    sampling: Sampling
    timeout_s: float
    max_failing_rollouts: int
    limits: Limits


@dataclass(slots=True)
class Counts:
    """How many rollouts are where, for people to watch; `failed` counts episodes, played again or not."""

    queued: int = 0
    live: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Player:
    """Plays groups with at most `max_live` rollouts at once.

    Args:
        chat: the model's format.
        settings: by name of the environment.
        seed: of the run; each turn's own seed follows from it and from its place.
        purpose: names the random stream, so that evaluation does not repeat the draws of training.
        finished: told of each episode as it ends, failed ones included.
    """

    chat: ChatFormat
    settings: Mapping[str, EnvSettings]
    seed: int
    max_live: int
    purpose: str = "train"
    finished: Callable[[Task, Episode], None] = lambda task, episode: None
    counts: Counts = field(default_factory=Counts)
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.max_live)

    async def play(self, task: Task, sampler: Callable[[], Sampler]) -> Group:
        """Play one task `group_size` times.

        Failed episodes are played again within the environment's budget. The group holds one episode for each member,
        the last one played.

        Raises:
            ServiceError: the service failed after retries.
            UsageError: the environment and the model do not fit together.
        """
        settings = self.settings[task.name]
        budget = _Budget(settings.max_failing_rollouts)
        self.counts.queued += settings.group_size
        members = range(settings.group_size)
        episodes = await together(self._member(task, member, sampler, budget) for member in members)
        return Group(task.name, str(getattr(task.env, "task_id", task.draw)), task.draw, tuple(episodes))

    async def _member(self, task: Task, member: int, sampler: Callable[[], Sampler], budget: _Budget) -> Episode:
        attempt = 0
        while True:
            async with self._slots:
                self.counts.queued -= 1
                self.counts.live += 1
                try:
                    episode = await self._episode(task, member, attempt, sampler)
                finally:
                    self.counts.live -= 1
            self.counts.tokens += episode.sampled_tokens
            self.finished(task, episode)
            if episode.status != "failed":
                self.counts.done += 1
                return episode
            self.counts.failed += 1
            if not budget.spend():
                self.counts.done += 1
                return episode
            attempt += 1
            self.counts.queued += 1

    async def _episode(self, task: Task, member: int, attempt: int, sampler: Callable[[], Sampler]) -> Episode:
        settings = self.settings[task.name]
        place = (self.purpose, task.draw, member, attempt)
        policy = RecordingPolicy(
            sampler=sampler,
            chat=self.chat,
            sampling=settings.sampling,
            seed=lambda turn: derive(self.seed, *place, turn),
            limits=settings.limits,
        )
        started = time.monotonic()
        outcome, error = await _outcome(task.env, policy, timeout_s=settings.timeout_s)
        status = "failed" if outcome is None else "truncated" if outcome.truncated else "completed"
        return Episode(
            member=member,
            attempt=attempt,
            turns=policy.turns,
            status=status,
            reward=None if outcome is None else outcome.reward,
            metrics={} if outcome is None else outcome.metrics,
            info={} if outcome is None else outcome.info,
            seconds=time.monotonic() - started,
            error=error,
        )


@dataclass(slots=True)
class _Budget:
    left: int

    def spend(self) -> bool:
        self.left -= 1
        return self.left >= 0


async def _outcome(env: Env, policy: RecordingPolicy, *, timeout_s: float) -> tuple[Outcome | None, str | None]:
    """The boundary at which an environment's faults become data."""
    this = asyncio.current_task()
    limit = asyncio.timeout(timeout_s)
    started = time.monotonic()
    try:
        async with limit:
            result = await _awaited(env, policy)
        if _late(started, timeout_s):  # it held the event loop, so that nothing could interrupt it
            raise TimeoutError
        return as_outcome(result), None
    except (ServiceError, UsageError, MissingError):
        raise
    except LimitReached as error:
        return None, f"{error}; an environment that catches rlkit.LimitReached can grade what is there"
    except TimeoutError as error:
        expired = limit.expired() or _late(started, timeout_s)
        return None, f"the rollout took longer than {timeout_s:g} s (timeout_s)" if expired else _describe(error)
    except asyncio.CancelledError:
        if this is not None and this.cancelling():
            raise
        return None, "the environment cancelled its own rollout"
    except (Exception, SystemExit) as error:  # an environment may raise anything; the record says what
        return None, _describe(error)


def _late(started: float, timeout_s: float) -> bool:
    return time.monotonic() - started > timeout_s


async def _awaited(env: Env, policy: RecordingPolicy) -> object:
    playing: object = env.rollout(policy)
    if not inspect.isawaitable(playing):
        raise RewardError(f"{type(env).__name__}.rollout is an ordinary function; write `async def rollout`")
    return await playing


def _describe(error: BaseException) -> str:
    if isinstance(error, RewardError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
