"""Run the code of environments: play a rollout, or score a group.

Invariant: a fault of the environment is an episode without a reward; a fault of the service is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rlkit._util.seeds import derive_seed
from rlkit.chat.format import ChatFormat
from rlkit.env import GroupScorer, Task
from rlkit.policy import Limits, Policy, Sampler
from rlkit.rollout.boundary import play_env, score_group
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.types import Episode, Sampling


@dataclass(frozen=True, slots=True)
class EnvSettings:
    """Settings of the rollouts of an environment.

    Args:
        group_size: rollouts per task.
        sampling: settings of the sampler.
        timeout_s: limit in seconds of a rollout; service outages do not count (see `Stopwatch`).
        max_retries: failed episodes to play again, per group.
        min_valid: minimum number of valid episodes of a usable group.
        coalesce: environments whose groups send their first turns as one request.
        newest_weights: a running rollout uses newer weights from its next turn on.
    """

    group_size: int
    sampling: Sampling
    timeout_s: float
    max_retries: int
    limits: Limits
    min_valid: int = 1
    coalesce: Literal["single_turn", "always", "never"] = "never"
    newest_weights: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One attempt of a member of a group.

    Args:
        seed: seed of the run, from which the seed of each turn is derived.
        purpose: name of the random stream, so evaluation does not repeat the draws of training.
    """

    task: Task
    settings: EnvSettings
    member: int
    attempt: int
    seed: int
    purpose: str

    def seed_of(self, turn: int) -> int:
        """Return the seed of a turn."""
        draw = self.task.draw
        if turn == 0:  # consecutive in the group, so that its first turns can be one request
            return derive_seed(self.seed, self.purpose, draw, self.attempt) + self.member
        return derive_seed(self.seed, self.purpose, draw, self.member, self.attempt, turn)


class RolloutRunner(Protocol):
    """Runs the code of environments: in this process, or elsewhere (`rlkit.workers`)."""

    @property
    def batch_wait_s(self) -> float:
        """Time to wait for the first requests of a group, see `RequestBatcher`."""
        ...

    async def play(
        self, rollout: Rollout, sampler: Callable[[], Sampler], first_sampler: Callable[[], Sampler]
    ) -> Episode:
        """Play a rollout.

        Args:
            sampler: returns the sampler of a turn after the first.
            first_sampler: returns the sampler of the first turn.

        Raises:
            ServiceError: the service failed after retries.
            UsageError: the environment and the model do not fit together.
            MissingError: a package, model or credential is missing.
        """
        ...

    async def score(
        self, task: Task, episodes: Sequence[Episode], *, timeout_s: float
    ) -> tuple[list[float] | None, str | None]:
        """Score the valid episodes of a task that is a `GroupScorer`; results and errors as in `score_group`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LocalRunner:
    """Runs the code of environments in this process.

    Args:
        chat: the model's format; None with `make_policy`.
        make_policy: replaces the policy over a sampler.
    """

    chat: ChatFormat | None
    make_policy: Callable[[Sampling, Limits], Policy] | None = None
    batch_wait_s: float = 0.0

    async def play(  # noqa: D102  inherited
        self, rollout: Rollout, sampler: Callable[[], Sampler], first_sampler: Callable[[], Sampler]
    ) -> Episode:
        task, settings, member, attempt = rollout.task, rollout.settings, rollout.member, rollout.attempt
        if self.make_policy is not None:
            policy = self.make_policy(settings.sampling, settings.limits)
        else:
            assert self.chat is not None  # a policy over a sampler has a format
            policy = RecordingPolicy(
                sampler=sampler,
                first_sampler=first_sampler,
                chat=self.chat,
                sampling=settings.sampling,
                seed=rollout.seed_of,
                limits=settings.limits,
            )
        clock = asyncio.get_running_loop().time
        started_s = clock()
        outcome, error = await play_env(task.env, policy, timeout_s=settings.timeout_s, name=task.name)
        seconds = clock() - started_s
        if outcome is None:
            return Episode(member, attempt, policy.turns, "failed", None, {}, {}, seconds, error)
        status, reward = "truncated" if outcome.truncated else "completed", outcome.reward
        metrics, info, masked = outcome.metrics, outcome.info, outcome.masked
        return Episode(member, attempt, policy.turns, status, reward, metrics, info, seconds, masked=masked)

    async def score(  # noqa: D102  inherited
        self, task: Task, episodes: Sequence[Episode], *, timeout_s: float
    ) -> tuple[list[float] | None, str | None]:
        assert isinstance(task.env, GroupScorer)
        return await score_group(task.env, episodes, timeout_s=timeout_s, name=task.name)


@dataclass(frozen=True, slots=True, eq=False)
class Runners:
    """The runners of a run.

    Args:
        default: runner of all environments that are not named.
        training: runners by environment.
        evaluation: runners by environment of the evaluation.
        metrics: returns metrics of the runners since its last call.
    """

    default: RolloutRunner
    training: Mapping[str, RolloutRunner] = field(default_factory=dict[str, RolloutRunner])
    evaluation: Mapping[str, RolloutRunner] = field(default_factory=dict[str, RolloutRunner])
    metrics: Callable[[], Mapping[str, float]] = dict
