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
from rlkit.training.schedule import Pace, Supply
from rlkit.types import Episode, Group


class PublishedSampler:
    """The one place that holds the newest weights: the learner fills it, and every turn of a rollout reads it."""

    def __init__(self) -> None:
        self._sampler: PatientSampler | None = None

    def set(self, sampler: PatientSampler) -> None:
        """Replace the newest weights."""
        self._sampler = sampler

    @property
    def sampler(self) -> PatientSampler | None:
        """A sampler of the newest weights; None before there are any."""
        return self._sampler

    @property
    def newest(self) -> PatientSampler:
        """A sampler of the newest weights.

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
        number: of the step, from 1.
        groups: those that it has got so far, groups that were replaced included.
        is_trainable: it has all of its groups, and at least one of them counts.
        complete_s: time of the event loop at which the last group came.
        task_metrics: what the task sources said once they had seen the groups.
    """

    number: int
    groups: list[StepGroup] = field(default_factory=list[StepGroup])
    is_trainable: bool = False
    complete_s: float = 0.0
    task_metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Groups:
    """Draws tasks, plays them with the newest weights, and hands each step its groups.

    Args:
        sources: give the tasks.
        player: plays them.
        preparation: turns played groups into training sequences.
        pace: how far ahead of the trained weights groups are played.
        is_streaming: groups are trained on before their step is complete, so each is synced to the disk by itself.
        passes: how often the loss computes each sequence.
        store: journal of draws, episodes and steps.
        trackers: told when the tasks run out.
        usage: written down while groups are played.
        resumption: what an interrupted run has left.
    """

    def __init__(
        self,
        sources: Mixture,
        player: Player,
        preparation: Preparation,
        pace: Pace,
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
        self._pace = pace
        self._is_streaming = is_streaming
        self._passes = passes
        self._store = store
        self._trackers = trackers
        self._usage = usage
        self._failures = FailureNotes(trackers.note, redact=store.metadata.redact)
        self._interrupted = dict(resumption.interrupted)
        self._recorded_metrics = resumption.task_metrics
        self._needed = defaultdict[int, Usage](Usage)  # by draw: to train on its episodes once its group is complete
        for draw, earlier in resumption.interrupted.items():
            self._needed[draw] = sum(map(self._usage_of, earlier.episodes.values()), Usage())
        self._supply = Supply(
            pace,
            draw=self._draw,
            play=self._play,
            done=resumption.step,
            waiting=resumption.waiting,
            dry=lambda: sources.is_exhausted,
        )
        self._last_begun = resumption.step  # the last step that got a group that counts
        self._is_over = False
        self._news = asyncio.Event()  # one of the two has changed

    async def steps(self, *, after: int) -> AsyncGenerator[PendingStep]:
        """Yield the steps behind one, each for `fill` to give it its groups; the tasks or the budget may end them.

        Raises:
            RunFailed: there were no tasks at all.
        """
        try:
            for number in range(after + 1, self._pace.steps + 1):
                step = PendingStep(number)
                yield step
                if step.is_trainable:
                    continue
                if not self._supply.is_cut:
                    if number == 1 and not step.groups:
                        raise RunFailed("the environments gave no tasks at all")
                    self._trackers.note(f"the tasks have run out after {number - 1} steps")
                return
        finally:
            self._is_over = True
            self._news.set()

    async def fill(self, step: PendingStep) -> AsyncGenerator[StepGroup]:
        """Yield the groups of a step as they come out of play, until it has all that it gets.

        Raises:
            RolloutsFailed: too many groups in a row were of no use.
            Exception: what playing raised.
        """
        self.counts.done = self.counts.failed = 0
        while (taken := await self._supply.next()) is not None:
            step.groups.append(taken)
            if taken.is_trained and self._last_begun < step.number:
                self._last_begun = step.number
                self._news.set()
            yield taken
        if not self._is_streaming:  # who was finished first then leaves no trace
            step.groups.sort(key=lambda taken: taken.played.prepared.group.draw)
        step.is_trainable = not self._supply.is_cut and any(taken.is_trained for taken in step.groups)
        step.complete_s = asyncio.get_running_loop().time()

    def commit(self, step: PendingStep) -> Awaitable[None]:
        """Tell the task sources of a step's groups, and write the step into the journal.

        Returns:
            Done once the record is on the disk; nothing may be sampled from the step's weights before.

        Raises:
            EnvironmentFault: a task source failed.
            RunFailed: the journal cannot be written.
        """
        members = list[GroupRecord]()
        for taken in step.groups:
            group = taken.played.prepared.group
            self._sources.observe(group)
            members.append(GroupRecord(group.draw, taken.is_trained, len(group.episodes)))
        step.task_metrics = self._sources.metrics()
        return self._store.record_step(members, self._sources.state_dict())

    def publish(self, sampler: PatientSampler) -> None:
        """Let rollouts sample from new weights, and start the groups that may be played with them."""
        self.published.set(sampler)
        self._supply.trained(sampler.version)

    async def prepare(self, group: Group) -> PlayedGroup:
        """Turn a played group into training sequences.

        Raises:
            EnvironmentFault: the advantage estimator failed.
            RunFailed: a sequence is too long, and that is an error by the configuration.
            ServiceError: the reference of the KL penalty cannot be asked.
        """
        is_usable = int(group.valid.sum()) >= self._player.settings[group.env].min_valid
        return PlayedGroup(await self._preparation.prepare(group), is_usable)

    async def sync(self) -> None:
        """Return when all episodes that were played are on the disk.

        Raises:
            RunFailed: they cannot be written.
        """
        await self._store.sync()

    async def is_last(self, step: int) -> bool:
        """Return whether no group that is still in play makes another step; waits until that is known."""
        while self._last_begun <= step and not self._is_over:
            self._news.clear()
            await self._news.wait()
        return self._last_begun <= step

    def recorded_task_metrics(self, step: int) -> Mapping[str, float]:
        """Return what the task sources said after a step of the interrupted run."""
        return self._recorded_metrics.get(step, {})

    @property
    def counts(self) -> Counts:
        """Counts of the rollouts that wait, play and are done."""
        return self._player.counts

    @property
    def are_all_drawn(self) -> bool:
        """True where there is no further task, though some groups may still be in play."""
        return self._supply.exhausted

    @property
    def rank_after_next_step(self) -> int:
        """Place in the queue for slots behind the groups of the next step, and before those of the steps after it."""
        return self._sources.draws + self._pace.groups

    @property
    def pending_usage(self) -> Usage:
        """Usage of training on everything that was played and is in no step yet."""
        return sum(self._needed.values(), Usage(trained_tokens=self._supply.untrained * self._passes))

    def end(self) -> None:
        """Begin nothing more; a step that has not got all of its groups stays without them."""
        self._supply.end()

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
        self._needed.pop(task.draw, None)
        return played

    def _record_episode(self, task: Task, episode: Episode) -> None:
        self._record_score(task, episode)
        self._needed[task.draw] += self._usage_of(episode)

    def _record_score(self, task: Task, episode: Episode) -> None:
        self._store.record_episode(task, episode)
        self._failures.add(task, episode)

    def _usage_of(self, episode: Episode) -> Usage:
        """Return what training on an episode takes: with a KL penalty, its reference samples a token a sequence."""
        if episode.reward is None:
            return Usage()
        lengths = sequence_lengths(episode)
        scored = lengths if self._preparation.kl_penalty is not None else []
        trained = (sum(lengths) - len(lengths)) * self._passes
        return Usage(prefill_tokens=sum(scored), sampled_tokens=len(scored), trained_tokens=trained)
