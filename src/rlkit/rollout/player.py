"""Play groups of rollouts, with limits of concurrency, time and failures.

Invariant: every episode that starts ends in exactly one record. A fault of the environment fails the episode; it never
becomes a reward and never ends the run. A fault of the service does not fail an episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from rlkit._util.priority_semaphore import Slots, SlotsClosed
from rlkit._util.threads import run_together
from rlkit.env import GroupScorer, SingleTurnEnv, Task
from rlkit.policy import OpponentSamplers, Sampler, Samplers
from rlkit.rollout.request_batcher import RequestBatcher
from rlkit.rollout.runner import Rollout, RolloutRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.types import Episode, Group


@dataclass(slots=True)
class Counts:
    """Numbers of rollouts in each state, for progress displays; `failed` includes retried episodes."""

    queued: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0
    newest_error: str = ""  # reason of the last failure


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """Episodes of a group that were recorded before the run was interrupted."""

    episodes: Mapping[int, Episode] = field(default_factory=dict[int, Episode])  # last one of each member
    attempts: Mapping[int, int] = field(default_factory=dict[int, int])  # number of attempts of each member
    failed: int = 0  # number of retries already spent


async def _ignore(episode: Episode) -> None:
    pass


@dataclass(slots=True)
class Player:
    """Plays groups."""

    runner: RolloutRunner
    settings: Mapping[str, EnvSettings]  # by name of the environment
    seed: int  # as in `Rollout`
    slots: Slots  # limit of concurrent rollouts; earlier draws have priority
    purpose: str = "train"  # as in `Rollout`
    # Receives each episode when it ends, failed episodes too, and again if its reward changes when its group is scored.
    record: Callable[[Task, Episode], None] = lambda task, episode: None
    counts: Counts = field(default_factory=Counts)
    opponents: OpponentSamplers | None = None  # returns the samplers of opponents; None if there are none

    async def play(
        self,
        task: Task,
        sampler: Callable[[], Sampler],
        *,
        progress: GroupProgress = GroupProgress(),
        rank: int | None = None,
        on_end: Callable[[Episode], Awaitable[None]] = _ignore,
    ) -> Group:
        """Play a task `group_size` times and return the last episode of each member.

        Failed episodes are retried within the environment's budget of retries.

        Args:
            sampler: returns a sampler of the newest weights; called for each turn.
            progress: episodes played before an interruption.
            rank: priority of the group in the queue for slots, lowest first; by default its draw.
            on_end: called with the last episode of each member when it has ended, and awaited outside of its slot.

        Raises:
            SlotsClosed: a rollout got no slot; the other rollouts were finished and recorded.
            ServiceError: the service failed after retries.
            UsageError: the environment and the model do not fit together.
        """
        settings = self.settings[task.name]
        batcher = RequestBatcher(settings.group_size, self.runner.batch_wait_s)
        rank, retries = task.draw if rank is None else rank, settings.max_retries - progress.failed
        has_one_turn = settings.limits.max_turns == 1 or isinstance(task.env, SingleTurnEnv)
        is_batched = settings.coalesce == "always" or (settings.coalesce == "single_turn" and has_one_turn)
        group = _GroupInPlay(task, settings, sampler, batcher if is_batched else None, rank, retries)
        self.counts.queued += settings.group_size
        try:
            members = range(settings.group_size)
            played = await run_together(self._play_member(group, member, progress, on_end) for member in members)
        finally:
            batcher.close()
        episodes = [episode for episode in played if episode is not None]
        if len(episodes) < len(played):
            raise SlotsClosed(self.slots.close_reason)
        if isinstance(task.env, GroupScorer):
            episodes = await self._score(task, episodes, timeout_s=settings.timeout_s)
        return Group(task.name, task.id, task.draw, tuple(episodes))

    async def _score(self, task: Task, episodes: Sequence[Episode], *, timeout_s: float) -> Sequence[Episode]:
        valid = [episode for episode in episodes if episode.status != "failed"]
        if all(episode.group_scored for episode in valid):  # none, or scored before an interruption
            return episodes
        scores, error = await self.runner.score(task, valid, timeout_s=timeout_s)
        if error is not None:
            changed = [replace(episode, status="failed", reward=None, rewards={}, error=error) for episode in valid]
        elif scores is not None:
            pairs = zip(valid, scores, strict=True)
            changed = [replace(e, reward=score, rewards={}, group_scored=True) for e, score in pairs]
        else:
            return episodes
        for episode in changed:
            self.record(task, episode)
        by_member = {episode.member: episode for episode in changed}
        return [by_member.get(episode.member, episode) for episode in episodes]

    async def _play_member(
        self, group: _GroupInPlay, member: int, progress: GroupProgress, on_end: Callable[[Episode], Awaitable[None]]
    ) -> Episode | None:
        """Play a member until it succeeds or the retries are used up; None if it gets no slot."""
        episode, attempt = progress.episodes.get(member), progress.attempts.get(member, 0)
        while episode is None or (episode.status == "failed" and group.spend_retry()):
            try:
                episode = await self._play_in_slot(group, member, attempt)
            except SlotsClosed:
                return None
            if not group.settings.is_supervised:
                self.counts.tokens += episode.sampled_tokens
            self.record(group.task, episode)
            self.counts.failed += episode.status == "failed"
            self.counts.newest_error = episode.error or self.counts.newest_error
            self.counts.queued += 1  # to be finished, or played again
            attempt += 1
        self.counts.queued -= 1
        self.counts.finished += 1
        await on_end(episode)
        return episode

    async def _play_in_slot(self, group: _GroupInPlay, member: int, attempt: int) -> Episode:
        try:
            await self.slots.acquire((group.rank, member))
        finally:
            self.counts.queued -= 1
        self.counts.running += 1
        sampler, batcher = group.sampler if group.settings.newest_weights else cache(group.sampler), group.batcher
        first_sampler = sampler if batcher is None else (lambda: batcher.wrap(sampler()))
        rollout = Rollout(group.task.draw, group.settings, member, attempt, self.seed, self.purpose)
        try:
            return await self.runner.play(group.task, rollout, Samplers(first_sampler, sampler, self.opponents))
        finally:
            self.counts.running -= 1
            self.slots.release()


@dataclass(slots=True, eq=False)
class _GroupInPlay:
    """State that the members of a group share; `batcher` is None if first turns are separate requests."""

    task: Task
    settings: EnvSettings
    sampler: Callable[[], Sampler]
    batcher: RequestBatcher | None
    rank: int
    retries: int

    def spend_retry(self) -> bool:
        """Take a retry from the budget; False if none is left."""
        self.retries -= 1
        return self.retries >= 0
