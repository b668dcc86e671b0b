"""The groups of a run: tasks are drawn, played and prepared for training, and each step gets its own.

Invariant: a draw, an episode or a step is in the run's journal before anything follows from it, and in the order in
which the task sources saw it, so that a run that is resumed draws the same tasks.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass, field, replace

from rlkit.algorithms.datums import PlayedGroup, Preparation, StepGroup, sequence_lengths
from rlkit.cost.usage import Usage
from rlkit.env import Task
from rlkit.errors import RunFailed
from rlkit.rollout.player import Counts, FailureNotes, GroupProgress, Player
from rlkit.service.watch import PatientSampler
from rlkit.store import RunStore
from rlkit.store.history import GroupRecord
from rlkit.store.usage_log import UsageLog
from rlkit.tasks.sources import Mixture
from rlkit.trackers import Broadcast
from rlkit.training.resume import Resumption
from rlkit.training.schedule import GroupSupply, SupplyLimits
from rlkit.types import Episode, Group


class PublishedSampler:
    """The cell that holds the newest sampler: the learner fills it, and every turn of a rollout reads it."""

    def __init__(self) -> None:
        self._sampler: PatientSampler | None = None

    def set(self, sampler: PatientSampler) -> None:
        """Replace the sampler."""
        self._sampler = sampler

    @property
    def sampler(self) -> PatientSampler | None:
        """Sampler of the newest weights; None before there are any."""
        return self._sampler

    @property
    def newest(self) -> PatientSampler:
        """Sampler of the newest weights.

        Raises:
            RuntimeError: there are none yet.
        """
        if self._sampler is None:
            raise RuntimeError("there are no weights yet")
        return self._sampler


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step on its way from the first of its groups to new weights.

    Args:
        number: number of the step, from 1.
        groups: groups so far, those that were replaced included.
        is_trainable: the step has all of its groups, and at least one of them is trained on.
        complete_s: time of the event loop at which the last group came.
        task_metrics: metrics of the task sources after they observed the groups.
    """

    number: int
    groups: list[StepGroup] = field(default_factory=list[StepGroup])
    is_trainable: bool = False
    complete_s: float = 0.0
    task_metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Groups:
    """The groups of a run: tasks are drawn and played with the newest weights, and each step gets its own.

    Args:
        preparation: turns played groups into training sequences.
        is_streaming: groups are trained on before their step is complete, so each is synced to the disk by itself.
        passes: number of times that the loss computes each sequence.
        resumption: remains of an interrupted run.
    """

    def __init__(
        self,
        sources: Mixture,
        player: Player,
        preparation: Preparation,
        limits: SupplyLimits,
        *,
        is_streaming: bool,
        passes: int,
        store: RunStore,
        trackers: Broadcast,
        usage: UsageLog,
        resumption: Resumption,
    ) -> None:
        self.published = PublishedSampler()
        self._sources = sources
        self._player = replace(player, record=self._record_episode, record_score=self._record_score)
        self._preparation = preparation
        self._limits = limits
        self._is_streaming = is_streaming
        self._passes = passes
        self._store = store
        self._trackers = trackers
        self._usage = usage
        self._failures = FailureNotes(trackers.on_note, redact=store.metadata.redact)
        self._interrupted = dict(resumption.interrupted)
        self._recorded_metrics = resumption.task_metrics
        self._unprepared_usage = defaultdict[int, Usage](Usage)  # by draw: to train on the episodes of groups in play
        for draw, progress in resumption.interrupted.items():
            self._unprepared_usage[draw] = sum(map(self._usage_of, progress.episodes.values()), Usage())
        self._supply = GroupSupply(
            limits,
            draw=self._draw,
            play=self._play,
            trained_step=resumption.step,
            waiting=resumption.waiting,
            is_exhausted=lambda: sources.is_exhausted,
        )
        self._last_begun_step = resumption.step  # last step that got a group to train on
        self._has_ended = False
        self._news = asyncio.Event()  # one of the two has changed

    async def steps(self, *, after: int) -> AsyncGenerator[PendingStep]:
        """Yield the steps after a number, each for `fill` to give it its groups; the tasks or the budget may end them.

        Raises:
            RunFailed: there were no tasks at all.
        """
        try:
            for number in range(after + 1, self._limits.steps + 1):
                step = PendingStep(number)
                yield step
                if step.is_trainable:
                    continue
                if not self._supply.is_cut:
                    if number == 1 and not step.groups:
                        raise RunFailed("the environments gave no tasks at all")
                    self._trackers.on_note(f"the tasks have run out after {number - 1} steps")
                return
        finally:
            self._has_ended = True
            self._news.set()

    async def fill(self, step: PendingStep) -> AsyncGenerator[StepGroup]:
        """Yield the groups of a step as they come out of play, until it has all that it gets.

        Raises:
            RolloutsFailed: too many groups in a row were unusable.
            Exception: playing failed.
        """
        self.counts.finished = self.counts.failed = 0
        while (group := await self._supply.next_group()) is not None:
            step.groups.append(group)
            if group.is_trained and self._last_begun_step < step.number:
                self._last_begun_step = step.number
                self._news.set()
            yield group
        if not self._is_streaming:  # then the order in which groups were finished leaves no trace
            step.groups.sort(key=lambda group: group.played.prepared.group.draw)
        step.is_trainable = not self._supply.is_cut and any(group.is_trained for group in step.groups)
        step.complete_s = asyncio.get_running_loop().time()

    def commit(self, step: PendingStep) -> Awaitable[None]:
        """Show the groups of a step to the task sources, and write the step into the journal.

        Returns:
            Done once the record is on the disk; nothing may be sampled from the step's weights before.

        Raises:
            EnvironmentFault: a task source failed.
            RunFailed: the journal cannot be written.
        """
        members = list[GroupRecord]()
        for step_group in step.groups:
            group = step_group.played.prepared.group
            self._sources.observe(group)
            members.append(GroupRecord(group.draw, step_group.is_trained, len(group.episodes)))
        step.task_metrics = self._sources.metrics()
        return self._store.record_step(members, self._sources.state_dict())

    def publish(self, sampler: PatientSampler) -> None:
        """Let rollouts sample from new weights, and start the groups that may be played with them."""
        self.published.set(sampler)
        self._supply.advance(sampler.version)

    async def prepare(self, group: Group) -> PlayedGroup:
        """Turn a played group into training sequences.

        Raises:
            EnvironmentFault: the advantage estimator failed.
            RunFailed: a sequence is too long, and the configuration makes that an error.
            ServiceError: the service of the KL penalty's reference failed.
        """
        is_usable = int(group.valid_mask.sum()) >= self._player.settings[group.env].min_valid
        return PlayedGroup(await self._preparation.prepare(group), is_usable)

    async def sync(self) -> None:
        """Wait until all played episodes are on the disk.

        Raises:
            RunFailed: they cannot be written.
        """
        await self._store.sync()

    async def is_last(self, step: int) -> bool:
        """Return whether no group that is still in play makes another step; wait until that is known."""
        while self._last_begun_step <= step and not self._has_ended:
            self._news.clear()
            await self._news.wait()
        return self._last_begun_step <= step

    def recorded_task_metrics(self, step: int) -> Mapping[str, float]:
        """Return the metrics of the task sources after a step of the interrupted run."""
        return self._recorded_metrics.get(step, {})

    @property
    def counts(self) -> Counts:
        """Counts of rollouts that are queued, live, done and failed."""
        return self._player.counts

    @property
    def are_all_drawn(self) -> bool:
        """True where there is no further task, though some groups may still be in play."""
        return self._supply.are_all_drawn

    @property
    def rank_after_next_step(self) -> int:
        """Place in the queue for slots behind the groups of the next step, and before those of the steps after it."""
        return self._sources.draws + self._limits.groups

    @property
    def pending_usage(self) -> Usage:
        """Usage of training on everything that was played and is in no step yet."""
        ready = Usage(trained_tokens=self._supply.untrained_tokens * self._passes)
        return sum(self._unprepared_usage.values(), ready)

    async def close(self) -> None:
        """Stop playing."""
        await self._supply.close()

    def _draw(self) -> Task | None:
        tasks = self._sources.draw(1)
        if not tasks:
            return None
        self._store.record_draw(tasks[0])
        return tasks[0]

    async def _play(self, task: Task) -> PlayedGroup:
        progress = self._interrupted.pop(task.draw, GroupProgress())
        group = await self._player.play(task, lambda: self.published.newest, progress=progress)
        if self._is_streaming:  # otherwise the learner waits for the disk, once for all groups of a step
            await self._store.sync()
        await self._usage.write_if_due()
        played = await self.prepare(group)
        self._unprepared_usage.pop(task.draw, None)
        return played

    def _record_episode(self, task: Task, episode: Episode) -> None:
        self._record_score(task, episode)
        self._unprepared_usage[task.draw] += self._usage_of(episode)

    def _record_score(self, task: Task, episode: Episode) -> None:
        self._store.record_episode(task, episode)
        self._failures.add(task, episode)

    def _usage_of(self, episode: Episode) -> Usage:
        """Return the usage of training on an episode; the reference of a KL penalty samples a token a sequence."""
        if episode.reward is None:
            return Usage()
        lengths = sequence_lengths(episode)
        scored = lengths if self._preparation.kl_penalty is not None else []
        trained = (sum(lengths) - len(lengths)) * self._passes
        return Usage(prefill_tokens=sum(scored), sampled_tokens=len(scored), trained_tokens=trained)
