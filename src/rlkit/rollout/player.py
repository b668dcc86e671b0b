"""Playing groups: concurrency, time limits, failures.

Invariant: every episode that is started ends in exactly one record. What an environment does wrong becomes a failed
episode, never a reward and never a crash of the run; what the service does wrong is not blamed on the environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from rlkit._util.priority_semaphore import Slots
from rlkit._util.seeds import derive_seed
from rlkit._util.threads import run_together
from rlkit.chat.format import ChatFormat
from rlkit.env import GroupScorer, SingleTurnEnv, Task
from rlkit.policy import Limits, Policy, Sampler
from rlkit.rollout.boundary import play_env, scores_of
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.rollout.request_batcher import RequestBatcher
from rlkit.types import Episode, Group, Sampling

_ERROR_CHARS = 500
"""Characters of an error that a note shows."""


@dataclass(frozen=True, slots=True)
class EnvSettings:
    """How one environment of a run is played.

    Args:
        group_size: rollouts of one task.
        sampling: how completions are drawn.
        timeout_s: of one rollout, from when it begins to play; what is the service's fault does not count.
        max_retries: failed episodes of a group that are played again.
        min_valid: a group with fewer episodes that did not fail is of no use.
        limits: turns and context that one rollout may use.
        coalesce: of which environments the first turns of a group go out as one request.
        newest_weights: whether a running rollout moves to newer weights at its next turn.
    """

    group_size: int
    sampling: Sampling
    timeout_s: float
    max_retries: int
    limits: Limits
    min_valid: int = 1
    coalesce: Literal["single_turn", "always", "never"] = "never"
    newest_weights: bool = True


@dataclass(slots=True)
class Counts:
    """How many rollouts are where, for people to watch; `failed` counts episodes, played again or not."""

    queued: int = 0
    live: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0


def _nothing(task: Task, episode: Episode) -> None:
    pass


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """What was played of a group before the run was interrupted.

    Args:
        episodes: by member, what it has come to; only one that failed may be played again, within the budget.
        attempts: by member, how often it was played.
        failed: episodes that were played again because they failed.
    """

    episodes: Mapping[int, Episode] = field(default_factory=dict[int, Episode])
    attempts: Mapping[int, int] = field(default_factory=dict[int, int])
    failed: int = 0


class FailureNotes:
    """Notes the first failed episode of each environment.

    Args:
        note: given the message.
        redacted: takes the secrets out of an error.
        where: stands before the name of an environment, as "the evaluation of ".
    """

    def __init__(self, note: Callable[[str], None], *, redacted: Callable[[str], str], where: str = "") -> None:
        self._note = note
        self._redacted = redacted
        self._where = where
        self._noted = set[str]()

    def add(self, task: Task, episode: Episode) -> None:
        """Look at an episode that ended."""
        if episode.status != "failed" or task.name in self._noted:
            return
        self._noted.add(task.name)
        error = " ".join(self._redacted(episode.error or "it did not say why").split())
        cut = error if len(error) <= _ERROR_CHARS else f"{error[:_ERROR_CHARS]} …"
        self._note(f"the first failed rollout of {self._where}{task.name}, task {task.id}: {cut}")


@dataclass(slots=True)
class Player:
    """Plays groups.

    Args:
        chat: the model's format; None where `make` is given.
        settings: by name of the environment.
        seed: of the run; each turn's own seed follows from it and from its place.
        slots: bounds the rollouts that play at once; tasks drawn progress come first.
        purpose: names the random stream, so that evaluation does not repeat the draws of training.
        record: given each episode as it ends, failed ones included.
        scored: given each episode whose reward was changed once its group was complete, in the place of that one.
        make: makes the policy of an episode, in the place of one over a sampler.
    """

    chat: ChatFormat | None
    settings: Mapping[str, EnvSettings]
    seed: int
    slots: Slots
    purpose: str = "train"
    record: Callable[[Task, Episode], None] = _nothing
    scored: Callable[[Task, Episode], None] = _nothing
    make: Callable[[Sampling, Limits], Policy] | None = None
    counts: Counts = field(default_factory=Counts)

    async def play(
        self,
        task: Task,
        sampler: Callable[[], Sampler],
        *,
        progress: GroupProgress = GroupProgress(),
        rank: int | None = None,
    ) -> Group:
        """Play one task `group_size` times.

        Failed episodes are played again within the environment's budget. The group holds one episode for each member,
        the last one played.

        Args:
            task: what to play.
            sampler: the newest weights, asked for at each turn.
            progress: what was played of it already.
            rank: the group's place in the queue for slots; by default its draw.

        Raises:
            ServiceError: the service failed after retries.
            UsageError: the environment and the model do not fit together.
        """
        settings = self.settings[task.name]
        budget = _Budget(settings.max_retries - progress.failed)
        coalescer = RequestBatcher()
        group = _Playing(task, settings, sampler, coalescer, budget, task.draw if rank is None else rank)
        self.counts.queued += settings.group_size
        try:
            members = range(settings.group_size)
            episodes = await run_together(self._member(group, member, progress) for member in members)
        finally:
            coalescer.close()
        if isinstance(task.env, GroupScorer):
            episodes = await self._scored(task, task.env, episodes, timeout_s=settings.timeout_s)
        return Group(task.name, task.id, task.draw, tuple(episodes))

    async def _scored(
        self, task: Task, env: GroupScorer, episodes: Sequence[Episode], *, timeout_s: float
    ) -> list[Episode]:
        played = [episode for episode in episodes if episode.status != "failed"]
        if all(episode.group_scored for episode in played):  # there are none, or the run was interrupted
            return list(episodes)
        scores, error = await scores_of(env, played, timeout_s=timeout_s, name=task.name)
        if error is not None:
            changed = [replace(episode, status="failed", reward=None, error=error) for episode in played]
        elif scores is not None:
            changed = [
                replace(episode, reward=score, group_scored=True) for episode, score in zip(played, scores, strict=True)
            ]
        else:
            return list(episodes)
        for episode in changed:
            self.scored(task, episode)
        by_member = {episode.member: episode for episode in changed}
        return [by_member.get(episode.member, episode) for episode in episodes]

    async def _member(self, group: _Playing, member: int, progress: GroupProgress) -> Episode:
        attempt = progress.attempts.get(member, 0)
        if (last := progress.episodes.get(member)) is not None and (
            last.status != "failed" or not group.budget.spend()
        ):
            self.counts.queued -= 1
            self.counts.done += 1
            return last
        while True:
            episode = await self._in_turn(group, member, attempt)
            self.counts.tokens += episode.sampled_tokens
            self.record(group.task, episode)
            failed = episode.status == "failed"
            self.counts.failed += failed
            if not failed or not group.budget.spend():
                self.counts.done += 1
                return episode
            self.counts.queued += 1
            attempt += 1

    async def _in_turn(self, group: _Playing, member: int, attempt: int) -> Episode:
        try:
            await self.slots.acquire((group.rank, member))
        finally:
            self.counts.queued -= 1
        self.counts.live += 1
        try:
            return await self._episode(group, member, attempt)
        finally:
            self.counts.live -= 1
            self.slots.release()

    async def _episode(self, group: _Playing, member: int, attempt: int) -> Episode:
        settings, task = group.settings, group.task
        policy = self._policy(group, member, attempt)
        clock = asyncio.get_running_loop().time
        started = clock()
        outcome, error = await play_env(task.env, policy, timeout_s=settings.timeout_s, name=task.name)
        status = "failed" if outcome is None else "truncated" if outcome.truncated else "completed"
        return Episode(
            member=member,
            attempt=attempt,
            turns=policy.turns,
            status=status,
            reward=None if outcome is None else outcome.reward,
            metrics={} if outcome is None else outcome.metrics,
            info={} if outcome is None else outcome.info,
            seconds=clock() - started,
            error=error,
            masked=outcome is not None and outcome.masked,
        )

    def _policy(self, group: _Playing, member: int, attempt: int) -> Policy:
        settings, task = group.settings, group.task
        if self.make is not None:
            return self.make(settings.sampling, settings.limits)
        assert self.chat is not None  # a policy over a sampler has a format

        def seed(turn: int) -> int:
            if turn == 0:  # consecutive over the group, so that its first turns can be one request
                return derive_seed(self.seed, self.purpose, task.draw, attempt) + member
            return derive_seed(self.seed, self.purpose, task.draw, member, attempt, turn)

        newest = group.sampler if settings.newest_weights else cache(group.sampler)
        return RecordingPolicy(
            sampler=newest,
            first=(lambda: group.coalescer.gathered(newest())) if _coalesced(group) else newest,
            chat=self.chat,
            sampling=settings.sampling,
            seed=seed,
            limits=settings.limits,
        )


@dataclass(slots=True)
class _Budget:
    left: int

    def spend(self) -> bool:
        self.left -= 1
        return self.left >= 0


@dataclass(frozen=True, slots=True, eq=False)
class _Playing:
    """What the members of a group share."""

    task: Task
    settings: EnvSettings
    sampler: Callable[[], Sampler]
    coalescer: RequestBatcher
    budget: _Budget
    rank: int


def _coalesced(group: _Playing) -> bool:
    settings = group.settings
    single = isinstance(group.task.env, SingleTurnEnv) or settings.limits.max_turns == 1
    return settings.coalesce == "always" or (settings.coalesce == "single_turn" and single)
