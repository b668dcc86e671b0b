"""Run the code of environments: play a rollout, or score a group.

Invariant: every call of an environment ends with a result or with the reason of its failure in one line. Faults of the
service and of the configuration are raised.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from rlkit._util.frames import describe_error
from rlkit._util.json_values import escape_surrogates, safe_str
from rlkit._util.loop_holds import loop_holds
from rlkit._util.seeds import derive_seed
from rlkit._util.stopwatch import Stopwatch, use_stopwatches
from rlkit._util.threads import flatten_error, mark_retrieved
from rlkit.chat.format import ChatFormat
from rlkit.env import Env, GroupScorer, Task
from rlkit.errors import EnvironmentFault, LimitReached, MissingError, RewardError, ServiceError, UsageError
from rlkit.policy import Limits, Policy, Samplers
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.rollout.settings import EnvSettings
from rlkit.rollout.task_guard import EnvironmentExit, guard_tasks, stop
from rlkit.rollout.validation import as_outcome, as_scores
from rlkit.token_records.pictures import add_picture, add_reason, has_picture
from rlkit.types import Episode, Outcome, Sampling

type GroupScores = tuple[list[float] | None, str | None]
"""Rewards of a group, or None and the reason of the failure; None for both if the rewards stay unchanged."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One attempt of a member of a group."""

    draw: int
    settings: EnvSettings
    member: int
    attempt: int
    seed: int  # seed of the run, from which the seed of each turn is derived
    purpose: str  # name of the random stream, so evaluation does not repeat the draws of training

    def seed_of(self, turn: int) -> int:
        """Return the seed of a turn."""
        stream = (self.seed, self.purpose, self.draw)
        if turn == 0:  # consecutive in the group, so that its first turns can be one request
            return derive_seed(*stream, self.attempt) + self.member
        return derive_seed(*stream, self.member, self.attempt, turn)


class RolloutRunner(ABC):
    """Runs the code of environments: in this process, or elsewhere (`rlkit.workers`)."""

    batch_wait_s: float = 0.0
    """Time to wait for the first requests of a group, see `RequestBatcher`."""

    @abstractmethod
    async def play(self, task: Task, rollout: Rollout, samplers: Samplers) -> Episode:
        """Play a rollout of a task; errors as in `play_env`."""

    @abstractmethod
    async def score(self, task: Task, episodes: Sequence[Episode], *, timeout_s: float) -> GroupScores:
        """Score the valid episodes of a task that is a `GroupScorer`; errors as in `play_env`."""

    def metrics(self) -> Mapping[str, float]:
        """Return metrics since the last call; `time/env_busy` is the share of the time in which environments ran."""
        return {"time/env_busy": loop_holds().lap()}


@dataclass(frozen=True, eq=False)
class LocalRunner(RolloutRunner):
    """Runs the code of environments in this process."""

    chat: ChatFormat | None  # the model's format; None with `make_policy`
    make_policy: Callable[[Sampling, Limits], Policy] | None = None  # replaces the policy over a sampler

    async def play(self, task: Task, rollout: Rollout, samplers: Samplers) -> Episode:  # noqa: D102  inherited
        settings, member, attempt = rollout.settings, rollout.member, rollout.attempt
        if self.make_policy is not None:
            policy = self.make_policy(settings.sampling, settings.limits)
        else:
            assert self.chat is not None  # a policy over a sampler has a format
            policy = RecordingPolicy(
                sampler=samplers.later,
                first_sampler=samplers.first,
                chat=self.chat,
                sampling=settings.sampling,
                seed=rollout.seed_of,
                limits=settings.limits,
                opponents=samplers.opponents,
                is_supervised=settings.is_supervised,
            )
        policy.endpoint_host = settings.endpoint_host
        clock = asyncio.get_running_loop().time
        started_s = clock()
        outcome, error = await play_env(task.env, policy, timeout_s=settings.timeout_s, name=task.name)
        seconds = clock() - started_s
        if outcome is None:
            return Episode(member, attempt, policy.turns, "failed", None, {}, {}, seconds, error)
        status = "truncated" if outcome.truncated else "completed"
        scored = (outcome.reward, outcome.metrics, outcome.info)
        rewards, masked = outcome.rewards, outcome.masked
        episode = Episode(member, attempt, policy.turns, status, *scored, seconds, masked=masked, rewards=rewards)
        if not has_picture(task.env):
            return episode
        drawing = asyncio.to_thread(add_picture, task.env, episode)
        drawn, reason = await _guard(drawing, "the picture", Stopwatch(task.name), settings.timeout_s)
        return drawn or add_reason(task.env, episode, str(reason))

    async def score(  # noqa: D102  inherited
        self, task: Task, episodes: Sequence[Episode], *, timeout_s: float
    ) -> GroupScores:
        score, kind = cast("GroupScorer", task.env).score_group, type(task.env).__name__
        parse = partial(as_scores, count=len(episodes), env=kind)
        scoring = _await_call(lambda: score(episodes), parse, f"{kind}.score_group")
        return await _guard(scoring, "scoring the group", Stopwatch(task.name), timeout_s)


async def play_env(env: Env, policy: Policy, *, timeout_s: float, name: str = "") -> tuple[Outcome | None, str | None]:
    """Play an environment and return its outcome, or None and the reason of the failure.

    Args:
        timeout_s: limit in seconds; service outages do not count (see `Stopwatch`).
        name: name of the environment in the run; by default that of its class.

    Raises:
        ServiceError: the service failed after retries.
        UsageError: the environment and the model do not fit together.
        MissingError: a package, model or credential is missing.
    """
    kind = type(env).__name__
    playing = _await_call(
        lambda: env.rollout(policy),
        lambda result: as_outcome(result, env=kind, turns=policy.turns),
        f"{kind}.rollout",
    )
    return await _guard(playing, "the rollout", Stopwatch(name or kind), timeout_s)


async def _guard[T](
    call: Coroutine[object, object, T], activity: str, stopwatch: Stopwatch, timeout_s: float
) -> tuple[T | None, str | None]:
    """Run code of an environment in an asyncio task of its own, so that it cannot cancel the caller."""
    has_stopped = True
    guard_tasks()
    with use_stopwatches([stopwatch]):
        task = asyncio.create_task(call)
    task.add_done_callback(mark_retrieved)  # the caller may be cancelled before
    try:
        is_late = await stopwatch.wait_for_limit(timeout_s, task)
    finally:
        if not task.done():
            has_stopped = await stop([task])
    timeout = f"{activity} took longer than {timeout_s:g} s (timeout_s)"
    if is_late:
        return None, timeout if has_stopped else f"{timeout} and ignored its cancellation"
    try:
        result = task.result()
        # Code that blocks the event loop can exceed the limit and still return.
        return (None, timeout) if stopwatch.played_s > timeout_s else (result, None)
    except (ServiceError, UsageError, MissingError, KeyboardInterrupt):  # the last comes from a signal
        raise
    except asyncio.CancelledError:
        return None, "the environment cancelled its own rollout"
    except BaseException as error:  # an environment may raise anything; the record names the error
        errors = flatten_error(error)
        for fault in errors:
            if isinstance(fault, ServiceError | UsageError | MissingError):
                raise fault from error
        return None, " ".join(_describe(errors[0]).splitlines())


async def _await_call[T](call: Callable[[], object], parse: Callable[[object], T], method: str) -> T:
    """Await a method and parse its result here, because parsing may call the user's code (`__str__`)."""
    awaitable = call()
    if not inspect.isawaitable(awaitable):
        raise RewardError(f"{method} is an ordinary function; write `async def {method.rpartition('.')[2]}`")
    return parse(await awaitable)


def _describe(error: BaseException) -> str:
    if isinstance(error, EnvironmentFault):  # raised deliberately
        return safe_str(error)
    if isinstance(error, LimitReached):
        return f"{safe_str(error)}; an environment that catches rlkit.LimitReached can grade the result so far"
    error = (error.__cause__ if isinstance(error, EnvironmentExit) else None) or error
    return escape_surrogates(describe_error(error))
