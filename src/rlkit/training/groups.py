"""The groups of a run: draw tasks, play them, prepare them for training, and assign them to steps.

Invariant: draws, episodes and steps are recorded in the journal before they are used, in the order in which the task
sources observe them, so a resumed run draws the same tasks.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from types import MappingProxyType

from rlkit.algorithms.datums import EpisodeDrifts, PreparedGroup, StepGroup, sequence_lengths
from rlkit.algorithms.references import Drifts, Reference
from rlkit.cost.budget import Budget
from rlkit.cost.usage import Usage
from rlkit.env import Task
from rlkit.errors import RunFailed
from rlkit.metrics.env_reports import make_failure_reporter
from rlkit.rollout.player import GroupProgress, Player
from rlkit.service.watch import PatientSampler
from rlkit.store import RunStore
from rlkit.store.history import GroupRecord, History
from rlkit.tasks.sources import Mixture
from rlkit.trackers import Broadcast
from rlkit.training.schedule import GroupSupply
from rlkit.training.step import StepRecipe
from rlkit.types import Episode, Group


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step that is being played or trained on."""

    number: int  # number of the step, from 1
    groups: list[StepGroup] = field(default_factory=list[StepGroup])  # groups so far, replaced groups included
    is_trainable: bool = False  # the step has all of its groups, and trains on at least one of them
    complete_s: float = 0.0  # time of the event loop at which the last group was ready
    task_metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # of the sources, after these groups


@dataclass(eq=False)
class Groups:
    """The groups of a run, played with the newest weights and assigned to steps."""

    sources: Mixture
    player: Player
    recipe: StepRecipe
    _: KW_ONLY
    store: RunStore
    trackers: Broadcast
    budget: Budget
    history: InitVar[History]
    interrupted: InitVar[Mapping[int, GroupProgress]]  # finished episodes of the waiting tasks, by draw
    sampler: PatientSampler | None = None  # of the newest weights, set by the learner; None until they are loaded

    def __post_init__(self, history: History, interrupted: Mapping[int, GroupProgress]) -> None:
        self.player = replace(self.player, record=self._record)
        self._report_failure = make_failure_reporter(self.trackers.on_note, redact=self.store.metadata.redact)
        self._interrupted = dict(interrupted)
        self.recorded_task_metrics = history.task_metrics
        self._unprepared_usage = defaultdict[int, Usage](Usage)  # by draw: training on episodes of unfinished groups
        self._unscored_usage = dict[tuple[int, int], Usage]()  # by draw and member: requests to references to come
        for draw, progress in interrupted.items():
            for episode in progress.episodes.values():
                self._reserve_usage(draw, episode)
        self.supply = GroupSupply(
            self.recipe.limits,
            draw=self._draw,
            play=self._play,
            trained_step=history.step,
            waiting=history.waiting,
            is_exhausted=lambda: self.sources.is_exhausted,
        )
        self._last_begun_step = history.step  # last step with a group to train on
        self._has_ended = False
        self._progress = asyncio.Event()  # set when `_last_begun_step` or `_has_ended` changes

    async def steps(self, *, after: int) -> AsyncGenerator[PendingStep]:
        """Yield the steps after a number, for `fill` to add their groups, until the tasks or the budget run out."""
        try:
            for number in range(after + 1, self.recipe.limits.steps + 1):
                step = PendingStep(number)
                yield step
                if step.is_trainable:
                    continue
                if not self.supply.is_cut:
                    if number == 1 and not step.groups:
                        raise RunFailed("the environments have no tasks")
                    self.trackers.on_note(f"the tasks have run out after {number - 1} steps")
                return
        finally:
            self._has_ended = True
            self._progress.set()

    async def fill(self, step: PendingStep) -> AsyncGenerator[StepGroup]:
        """Yield the groups of a step as they are ready; raise `RolloutsFailed` after too many unusable groups."""
        while (group := await self.supply.next_group()) is not None:
            step.groups.append(group)
            if group.is_trained and self._last_begun_step < step.number:
                self._last_begun_step = step.number
                self._progress.set()
            yield group
        if not self.recipe.is_streaming:  # make the result independent of the order in which groups finished
            step.groups.sort(key=lambda group: group.prepared.group.draw)
        step.is_trainable = not self.supply.is_cut and any(group.is_trained for group in step.groups)
        step.complete_s = asyncio.get_running_loop().time()

    def commit(self, step: PendingStep) -> Awaitable[None]:
        """Let the task sources observe the groups of a step, and record the step in the journal.

        The awaitable waits for the disk; nothing may be sampled from the step's weights before.
        """
        members = list[GroupRecord]()
        for step_group in step.groups:
            group = step_group.prepared.group
            self.sources.observe(group)
            members.append(GroupRecord(group.draw, step_group.is_trained, len(group.episodes)))
        step.task_metrics = self.sources.metrics()
        return self.store.record_step(members, self.sources.state_dict())

    def publish(self, sampler: PatientSampler) -> None:
        """Let rollouts sample from new weights, and start the groups that these weights allow."""
        self.sampler = sampler
        self.player.counts.finished = self.player.counts.failed = 0  # while a step trains, its counts are shown
        self.supply.advance(sampler.version)

    async def prepare(self, group: Group, early: EpisodeDrifts = MappingProxyType({})) -> PreparedGroup:
        """Turn a played group into training sequences; arguments and errors as in `Preparation.prepare`."""
        is_usable = int(group.valid_mask.sum()) >= self.player.settings[group.env].min_valid
        return replace(await self.recipe.preparation.prepare(group, early), is_usable=is_usable)

    async def is_last(self, step: int) -> bool:
        """Wait until it is certain whether another step follows; return True if none does."""
        while self._last_begun_step <= step and not self._has_ended:
            self._progress.clear()
            await self._progress.wait()
        return self._last_begun_step <= step

    @property
    def newest_sampler(self) -> PatientSampler:
        """Sampler of the newest weights, which every turn of a rollout reads; `RuntimeError` without weights."""
        if self.sampler is None:
            raise RuntimeError("there are no weights yet")
        return self.sampler

    @property
    def pending_usage(self) -> Usage:
        """Usage of training on all episodes that are in no step yet."""
        ready = Usage(trained_tokens=self.supply.untrained_tokens * self.recipe.loss.passes)
        return sum((*self._unprepared_usage.values(), *self._unscored_usage.values()), ready)

    def _draw(self) -> Task | None:
        if (task := self.sources.draw()) is not None:
            self.store.record_draw(task)
        return task

    async def _play(self, task: Task) -> PreparedGroup:
        progress, drifts = self._interrupted.pop(task.draw, GroupProgress()), dict[tuple[int, Reference], Drifts]()

        async def ask_references(episode: Episode) -> None:
            drifts.update(await self.recipe.preparation.ask_references(task.name, episode))
            self._unscored_usage.pop((task.draw, episode.member), None)

        group = await self.player.play(task, lambda: self.newest_sampler, progress=progress, on_end=ask_references)
        if self.recipe.is_streaming:  # trained on before the step is complete; else the learner syncs a step at once
            await self.store.sync()
        await self.budget.write_if_due()
        prepared = await self.prepare(group, drifts)
        self._unprepared_usage.pop(task.draw, None)
        return prepared

    def _record(self, task: Task, episode: Episode) -> None:
        self.store.record_episode(task, episode)
        self._report_failure(task, episode)
        if not episode.group_scored:  # else it was counted when it ended
            self._reserve_usage(task.draw, episode)

    def _reserve_usage(self, draw: int, episode: Episode) -> None:
        """Count the usage of training on an episode as pending; a reference samples one token per sequence."""
        if episode.reward is None:
            return
        lengths = sequence_lengths(episode)
        scored = lengths * max(map(len, self.recipe.preparation.references.values()), default=0)
        self._unprepared_usage[draw] += Usage(trained_tokens=(sum(lengths) - len(lengths)) * self.recipe.loss.passes)
        self._unscored_usage[draw, episode.member] = Usage(prefill_tokens=sum(scored), sampled_tokens=len(scored))
