"""The training loop: one loop for every schedule, from tasks to better weights.

Invariant: what a step was made of is on the disk before the weights that it made are sampled from; whatever ends the
run, the directory says how it ended and can be resumed from.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from rlkit.batch import Preparation
from rlkit.config.schema import CheckpointConfig
from rlkit.errors import RlkitError, RunFailed, ServiceError
from rlkit.evaluation import Evaluation
from rlkit.metrics import batch_metrics, group_metrics, update_metrics
from rlkit.policy import Sampler
from rlkit.reporter import Reporter
from rlkit.rollouts import Player
from rlkit.schedule import Played, Supply, Taken
from rlkit.service import Learner
from rlkit.service.watch import PatientSampler, Watch
from rlkit.sources import Mixture
from rlkit.store import RunStore
from rlkit.trackers import Broadcast, Checkpoint, Phase, Progress, RunResult
from rlkit.update import Recipe, StepUpdate

DAY_S = 24 * 3600
_RECOVERIES_MAX = 20
_LAST_SAVE_S = 120.0

type Restore = Callable[[int], Awaitable[tuple[Learner, int]]]
"""Gives the weights of the newest checkpoint up to a step, and the step that it is of; fresh ones are of step 0."""


class Trainer(Protocol):
    """Makes a model better.

    ::

        result = await rlkit.RLTrainer(config, envs=tasks).train()
        print(result.metrics["env/all/reward/mean"])
    """

    async def train(self) -> RunResult:
        """Train to the end, or until asked to stop."""
        ...


class StopSignal:
    """Asks a run, from any thread, to finish its step, save and end."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def request(self) -> None:
        """Ask. Asking twice is asking once."""
        self._event.set()

    @property
    def requested(self) -> bool:
        """Whether someone asked."""
        return self._event.is_set()


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop is made of.

    Args:
        restore: gives the weights to train.
        supply: gives each step its groups.
        tasks: are told of the groups of each step.
        player: whose counts are shown while it plays.
        preparation: makes training sequences of groups.
        recipe: makes requests of training sequences.
        min_valid: by environment, episodes with a reward that a group must have.
        evaluation: what is measured.
        checkpoints: when weights are saved.
        steps: of the run in all.
        store: of the run.
        trackers: told of every step; what they raise is noted and dropped.
        watch: over the calls to the service.
        stop: looked at between steps.
    """

    restore: Restore
    supply: Supply
    tasks: Mixture
    player: Player
    preparation: Preparation
    recipe: Recipe
    min_valid: Mapping[str, int]
    evaluation: Evaluation
    checkpoints: CheckpointConfig
    steps: int
    store: RunStore
    trackers: Broadcast
    watch: Watch
    stop: StopSignal


class Loop:
    """The loop itself.

    Args:
        parts: what it works with.
        step: the last one whose groups are known; its weights are made again.
        weights: what `Parts.restore` gives for that step.
    """

    def __init__(self, parts: Parts, *, step: int, weights: tuple[Learner, int]) -> None:
        self._parts = parts
        self._learner, self._learner_step = weights
        self._first = self._step = step
        self._reporter = Reporter(parts.store, parts.trackers)
        self._started = time.monotonic()
        self._phase: Phase = "preparing"
        self._newest: Sampler | None = None
        self._making: StepUpdate | None = None
        self._saved: Checkpoint | None = None
        self._saving: asyncio.Task[None] | None = None
        self._saves = Counter[int]()

    @property
    def newest(self) -> Sampler:
        """The newest weights.

        Raises:
            RuntimeError: the run has not begun.
        """
        if self._newest is None:
            raise RuntimeError("there are no weights yet")
        return self._newest

    async def run(self) -> RunResult:
        """Train until the steps are done, the tasks run out or someone asks to stop, and save what was learned.

        Raises:
            RunFailed: too many rollouts failed, or the disk is full.
            EnvironmentFault: the advantage estimator failed.
            ServiceError: the service failed after retries.
        """
        parts = self._parts
        looking = asyncio.create_task(parts.watch.look())
        try:
            try:
                await self._begin()
                await self._train()
            except Exception:
                await parts.supply.close()  # nothing more is played, and paid for, while the weights are saved
                # What ended the run matters more than that it cannot be saved.
                with suppress(RlkitError, OSError, TimeoutError):
                    if self._step > self._first and not (self._making and self._making.stepped):
                        async with asyncio.timeout(_LAST_SAVE_S):
                            await self._save()
                raise
            await parts.supply.close()
            await self._save()
            await self._reporter.drain()
            await parts.store.settle()
        finally:
            looking.cancel()
            await parts.supply.close()
            await self._reporter.close()
            if self._saving is not None:
                self._saving.cancel()
        self._phase = "done"
        status = "interrupted" if parts.stop.requested and self._step < parts.steps else "completed"
        directory = parts.store.directory
        return RunResult(directory.name, directory, status, self._step, self._reporter.last, self._saved)

    def progress(self) -> Progress:
        """Where the run stands; may be called from any thread."""
        parts = self._parts
        counts = (parts.evaluation.player if self._phase == "evaluating" else parts.player).counts
        return Progress(
            step=self._step,
            steps=parts.steps,
            phase=self._phase,
            queued=counts.queued,
            live=counts.live,
            done=counts.done,
            failed=counts.failed,
            tokens=parts.player.counts.tokens + parts.evaluation.player.counts.tokens,
            seconds=time.monotonic() - self._started,
            first_step=self._first,
        )

    async def _begin(self) -> None:
        """Restore the weights, and take the steps again that were taken since."""
        # One that was passed over is as good as not saved.
        usable = [saved for saved in self._parts.store.checkpoints() if saved.step == self._learner_step]
        self._saved = usable[-1] if usable else None
        if self._learner_step == 0 and self._parts.evaluation.due(0, last=self._parts.steps):
            self._newest = await self._relabelled(0)
            self._report({}, step=0)
        await self._take_again(self._step)
        self._newest = await self._relabelled(self._step)
        self._parts.supply.trained(self._step)

    async def _train(self) -> None:
        parts = self._parts
        clock = asyncio.get_running_loop().time
        while self._step < parts.steps and not parts.stop.requested:
            started = clock()
            self._phase = "sampling"
            parts.player.counts.done = parts.player.counts.failed = 0
            update, taken = self._update(self._step + 1), list[Taken]()
            while (one := await parts.supply.next()) is not None:
                taken.append(one)
                update.add(one.played.prepared, counts=one.counts)
                self._reporter.check()
            if not any(one.counts for one in taken):
                if not self._step and not taken:
                    raise RunFailed("the environments gave no tasks at all")
                parts.trackers.note(f"the tasks have run out after {self._step} steps")
                return
            sampled = clock()
            self._phase = "training"
            metrics = await self._advance(taken, update)
            trained = clock()
            metrics |= {
                "time/sample_s": sampled - started,
                "time/train_s": trained - sampled,
                "time/step_s": clock() - started,
            }
            self._report(metrics, step=self._step)

    async def _advance(self, taken: Sequence[Taken], update: StepUpdate) -> dict[str, float]:
        """Finish a step whose groups are there, and make its weights the newest."""
        parts, step = self._parts, self._step + 1
        learner = self._learner
        update.finish()
        save = self._save_due(step)
        for one in taken:
            parts.tasks.observe(one.played.prepared.group)
        drawn = [(one.played.prepared.group.draw, one.counts) for one in taken]
        written = parts.store.record_step(drawn, parts.tasks.state_dict())
        metrics = await self._result(step, taken, update)
        self._step = step  # the weights have moved, whether or not that can be written down
        await written
        parts.supply.trained(step)
        if learner is not self._learner:  # it failed, and what it saves is not to be trusted
            save = self._save_due(step)
        if save is not None:
            self._saving = asyncio.create_task(self._saved_later(self._saving, step, save))
        return metrics

    async def _result(self, step: int, taken: Sequence[Taken], update: StepUpdate) -> dict[str, float]:
        """Wait for a step's weights; when the service fails, go back to the last checkpoint and take the steps anew."""
        for failures in range(_RECOVERIES_MAX + 1):
            try:
                if failures:
                    self._parts.trackers.note(f"going back to the last checkpoint, to take step {step} again")
                    self._learner, self._learner_step = await self._parts.watch.call(
                        lambda: self._parts.restore(step - 1), "loading weights", retry=True
                    )
                    await self._take_again(step - 1)
                    update = self._update(step)
                    for one in taken:
                        update.add(one.played.prepared, counts=one.counts)
                    update.finish()
                return await self._taken(step, taken, update)
            except ServiceError as error:
                if failures == _RECOVERIES_MAX or self._parts.watch.gone:
                    raise
                self._parts.trackers.note(str(error))
        raise AssertionError("the last failure is raised")

    async def _taken(self, step: int, taken: Sequence[Taken], update: StepUpdate) -> dict[str, float]:
        """Wait for the weights of a step, and make them the newest."""
        groups = [one.played.prepared.group for one in taken]
        metrics = {**group_metrics(groups, prefix="env"), **batch_metrics(taken, version=step - 1)}
        result = await self._parts.watch.call(update.result, "training")
        if result is None:
            self._parts.trackers.note(f"step {step}: every group's rewards are equal, so there is nothing to learn")
            self._newest = await self._relabelled(step)
            self._making = None
            return {**metrics, "optim/skipped": 1.0}
        sampler, done = result
        self._newest = PatientSampler(sampler, self._parts.watch, step)
        self._making = None
        agreement = await asyncio.to_thread(update_metrics, done)  # of a million tokens, it would hold the event loop
        return {**metrics, "optim/skipped": 0.0, **agreement}

    async def _take_again(self, upto: int) -> None:
        """Take the steps up to `upto` again that were taken since the weights that were restored."""
        parts = self._parts
        self._newest = None
        for step in range(self._learner_step + 1, upto + 1):
            parts.trackers.note(f"taking step {step} again, without sampling")
            update, taken = self._update(step), list[Taken]()
            for kept in await parts.store.groups(step):
                usable = int(kept.group.valid.sum()) >= parts.min_valid[kept.group.env]
                taken.append(Taken(Played(parts.preparation.prepare(kept.group), usable), kept.counts))
                update.add(taken[-1].played.prepared, counts=kept.counts)
            update.finish()
            metrics = await self._taken(step, taken, update)
            if not parts.store.has_metrics(step):
                self._report(metrics, step=step)

    async def _relabelled(self, step: int) -> Sampler:
        """The newest weights, known as those of `step`."""
        if isinstance(self._newest, PatientSampler):
            return PatientSampler(self._newest.of, self._parts.watch, step)
        sampler = await self._parts.watch.call(lambda: self._learner.sampler(step), "handing over weights", retry=True)
        return PatientSampler(sampler, self._parts.watch, step)

    def _update(self, step: int) -> StepUpdate:
        self._making = StepUpdate(self._learner, self._parts.recipe, version=step)
        return self._making

    def _report(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Report a step, once the evaluation of its weights is there, if one is due."""
        parts = self._parts
        due = parts.evaluation.due(step, last=parts.steps) and not parts.store.has_metrics(step)
        evaluation = None
        if due:
            if step in (0, parts.steps):
                self._phase = "evaluating"
            rank = parts.tasks.drawn + parts.recipe.groups  # before the groups of the steps after the next
            evaluation = asyncio.create_task(parts.evaluation.run(self.newest, rank=rank))
        self._reporter.add(step, metrics, evaluation)

    def _save_due(self, step: int) -> Awaitable[tuple[str, str]] | None:
        every = self._parts.checkpoints.every
        return self._submit_save(step) if every and step % every == 0 else None

    def _submit_save(self, step: int) -> Awaitable[tuple[str, str]]:
        self._saves[step] += 1  # one that failed may have left its name behind
        again = f"-{self._saves[step]}" if self._saves[step] > 1 else ""
        return self._learner.save(f"step-{step:06d}{again}", ttl_s=self._ttl_s)

    @property
    def _ttl_s(self) -> int | None:
        days = self._parts.checkpoints.ttl_days
        return None if days is None else round(days * DAY_S)

    async def _saved_later(
        self, earlier: asyncio.Task[None] | None, step: int, save: Awaitable[tuple[str, str]]
    ) -> None:
        if earlier is not None:
            await earlier
        try:
            self._record(step, *await self._parts.watch.call(lambda: save, "saving a checkpoint"))
        except ServiceError as error:
            self._parts.trackers.note(f"the checkpoint of step {step} could not be saved: {error}")

    async def _save(self) -> None:
        """Save the weights as they are, unless they are saved."""
        self._phase = "saving"
        if self._saving is not None:
            await self._saving
        if self._saved is None or self._saved.step != self._step:
            saved = self._parts.watch.call(lambda: self._submit_save(self._step), "saving a checkpoint", retry=True)
            self._record(self._step, *await saved)

    def _record(self, step: int, state: str, sampler: str) -> None:
        expires = None if self._ttl_s is None else time.time() + self._ttl_s
        self._saved = Checkpoint(step, state, sampler, expires)
        self._parts.store.add_checkpoint(self._saved)
        self._parts.trackers.checkpoint(self._saved)
