"""The learner of a run: train step by step, and recover the weights if the service fails.

Invariant: a repeated step trains on the same groups in the same order. The service's weights contain the last trained
step, and at most the optimiser steps of the steps submitted after it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field

from rlkit._util.threads import in_thread
from rlkit.algorithms.datums import PreparedGroup, StepGroup
from rlkit.cost.usage import Usage
from rlkit.errors import ServiceError
from rlkit.metrics.metrics import SOLVED, step_metrics, update_metrics
from rlkit.service import Learner
from rlkit.service.watch import PatientSampler, ServiceWatch
from rlkit.token_records.updates import record_update
from rlkit.training.checkpoints import PendingCheckpoint
from rlkit.training.groups import Groups, PendingStep
from rlkit.training.run import Run, TrainedStep
from rlkit.training.step import StepRecipe, StepUpdate

_MAX_RECOVERIES = 20


@dataclass(slots=True, eq=False)
class PolicyLearner:
    """Learner of a run.

    A step is submitted while the service still computes the step before it, so the service does not wait between steps.
    """

    run: Run
    groups: Groups
    _: KW_ONLY
    recipe: StepRecipe
    watch: ServiceWatch
    load_weights: Callable[[int], Awaitable[tuple[Learner, int]]]  # loads weights up to a step if the service fails
    learner: Learner  # the service's handle of the weights
    step: int  # step of these weights
    _updates: deque[StepUpdate] = field(default_factory=deque[StepUpdate])  # of the submitted steps
    _complete_steps: asyncio.Queue[PendingStep | None] = field(default_factory=asyncio.Queue[PendingStep | None])
    _submitting: asyncio.Task[None] | None = None
    _is_recovering: bool = False
    _noted_skips: set[str] = field(default_factory=set[str])

    @property
    def pending_usage(self) -> Usage:
        """Usage of the gradients of submitted groups that the service has not computed yet."""
        tokens = sum(update.untrained_tokens for update in self._updates)
        return Usage(trained_tokens=tokens * self.recipe.loss.passes)

    async def replay(self) -> None:
        """Restore the weights of the run's last step from the newest checkpoint and the recorded groups.

        Raises:
            ServiceError: the service failed repeatedly, or for too long.
            UsageError: the groups of a step are no longer on the disk.
        """
        run, groups = self.run, self.groups
        run.checkpoints.resume_from(self.step, newest_tried=run.store.find_last_measured_step(run.step))
        if self.step == 0 and run.evaluation.is_due(0, last=run.steps):
            groups.sampler = await self._make_sampler()
            if not run.store.measured_steps:  # an evaluation that is added on resumption begins at the current step
                run.begin_report(0, {}, groups.newest_sampler)
        while groups.sampler is None or self.step < run.step:
            step, is_new = min(self.step + 1, run.step), self.step < run.step
            # Each try reads the current sampler, because a recovery publishes another one.
            groups.sampler = await self._retry_from_checkpoint(
                lambda step=step: self._replay_through(step, groups.sampler), last_trained=step
            )
            is_missing = is_new and not run.checkpoints.is_recorded(step)
            if is_missing and (pending := self._request_checkpoint(step)) is not None:
                run.checkpoints.record(step, pending)  # without it, an interruption would repeat the whole replay
            run.reporter.raise_failure()
            if run.stop.is_requested:  # later steps stay on the disk and are replayed on the next resumption
                run.step = self.step
        groups.publish(groups.newest_sampler)

    async def submit(self, steps: AsyncGenerator[PendingStep]) -> AsyncGenerator[PendingStep]:
        """Request the gradients of steps as their groups are ready, and yield each step once it is fully requested.

        After a request to stop, no step is begun; steps with requested optimiser steps are finished. Errors of task
        sources, rollouts and estimators, and of the journal, are raised here.
        """
        run = self.run
        run.timer.start()
        run.phase = "sampling"
        self._submitting = asyncio.create_task(self._submit_steps(steps))
        while (step := await self._complete_steps.get()) is not None:
            run.phase = "training"
            yield step
            run.phase = "sampling"
            step.groups.clear()  # they are on the disk; free their memory before the next step is complete
            if run.is_ending and self._complete_steps.empty() and not self._is_ahead:
                return
        await self._submitting  # raises its exception

    async def train(self, step: PendingStep) -> TrainedStep:
        """Wait for the weights of a submitted step; recover them if the service fails, as `replay` does."""
        update, groups = self._updates[0], self.groups
        trained = await self._retry_from_checkpoint(
            lambda: self._wait_for_update(step.number, step.groups, update, current=groups.newest_sampler),
            last_trained=step.number - 1,
        )
        self._updates.popleft()
        self.step = self.run.step = step.number  # the weights have changed, even if that cannot be recorded
        return trained

    async def save(self) -> None:
        """Save the weights of the last trained step, unless they are saved; drop later steps.

        Raises:
            RlkitError: the service failed after retries, or the checkpoint cannot be recorded.
        """
        if await self.run.checkpoints.is_saved(self.step):
            return
        if self._is_ahead:  # the weights contain optimiser steps of a dropped step
            self.cancel_requests()
            self._updates.clear()
            await self._recover(self.step, with_reports=False)
        await self.run.checkpoints.save(self.learner, self.step)

    async def stop_submitting(self) -> None:
        """Stop submitting steps."""
        if self._submitting is not None:
            self._submitting.cancel()
            await asyncio.gather(self._submitting, return_exceptions=True)

    def cancel_requests(self) -> None:
        """Cancel all requests of the submitted steps.

        The service's learner cannot be used afterwards: new requests may wait behind cancelled requests.
        """
        for update in self._updates:
            update.cancel()

    @property
    def _is_ahead(self) -> bool:
        """True if the service's weights may contain more than the last trained step."""
        return any(update.has_optimizer_steps for update in self._updates)

    async def _submit_steps(self, steps: AsyncGenerator[PendingStep]) -> None:
        try:
            async with aclosing(steps):
                async for step in steps:
                    if self.run.is_ending:
                        return
                    learner = None if self._is_recovering else self.learner
                    update = StepUpdate(learner, self.recipe, version=step.number)
                    self._updates.append(update)
                    async for group in self.groups.fill(step):
                        update.add(group.prepared, is_trained=group.is_trained)
                        del group
                        self.run.reporter.raise_failure()
                    if step.is_trainable:
                        await self.run.store.sync()  # train only on episodes that are on the disk
                        update.finish()
                        if not self._is_recovering:
                            update.checkpoint = self._request_checkpoint(step.number)
                        self._complete_steps.put_nowait(step)
                    del step, update  # free the episodes before the next step is complete
        finally:
            self._complete_steps.put_nowait(None)

    async def _wait_for_update(
        self, step: int, groups: Sequence[StepGroup], update: StepUpdate, *, current: PatientSampler | None
    ) -> TrainedStep:
        """Wait for the weights of a step."""
        # For a million tokens, this call would block the event loop.
        metrics = await in_thread(lambda: step_metrics(groups, version=step - 1, supervised=self.recipe.supervised))
        result = await update.wait(self.watch)
        prepared, estimators = [group.prepared for group in groups], self.recipe.preparation.estimators
        recorded = record_update(self.run.store.directory, step, prepared, result and result[1], estimators=estimators)
        if result is None:
            self._note_skip(step, prepared)
            sampler, agreement = (current or await self._make_sampler()).sampler, dict[str, float]()
        else:
            sampler, agreement = result[0], await in_thread(update_metrics, result[1])
        metrics = {**metrics, "optim/skipped": float(result is None), **agreement}
        return TrainedStep(PatientSampler(sampler, self.watch, step), metrics, recorded, update.checkpoint)

    def _note_skip(self, step: int, prepared: Sequence[PreparedGroup]) -> None:
        """Report the first step that is not trained on for a reason; where all tasks are solved, a finding says so."""
        rewards = [group.group.rewards[group.group.valid_mask] for group in prepared]
        if any(map(len, rewards)) and all((values >= SOLVED).all() for values in rewards):
            return
        reason = "the rewards within each group are equal"
        if any(group.overlong for group in prepared):
            reason = "its sequences exceed batch.max_tokens before a token to train on (raise it)"
        if reason not in self._noted_skips:
            self._noted_skips.add(reason)
            self.run.note(f"step {step}: {reason}, so there is nothing to learn; optim/skipped marks such steps")

    async def _replay_through(
        self, last_step: int, sampler: PatientSampler | None, *, with_reports: bool = True
    ) -> PatientSampler:
        """Train on the recorded groups of the steps that the service's weights lack, up to `last_step`.

        Return a sampler of its weights, not published yet; `sampler` is that of the present weights, if there is one.
        """
        run = self.run
        for number in range(self.step + 1, last_step + 1):
            run.note(f"replaying step {number} from its recorded groups, without sampling")
            update, groups = StepUpdate(self.learner, self.recipe, version=number), list[StepGroup]()
            try:
                for recorded in await run.store.read_groups(number):
                    groups.append(StepGroup(await self.groups.prepare(recorded.group), recorded.is_trained))
                    update.add(groups[-1].prepared, is_trained=recorded.is_trained)
                update.finish()
                trained = await self._wait_for_update(number, groups, update, current=sampler)
            finally:
                update.cancel()
            self.step, sampler = number, trained.sampler
            await trained.recorded
            if with_reports and not run.reporter.has_report(number):
                task_metrics = self.groups.recorded_task_metrics.get(number, {})
                run.begin_report(number, {**trained.metrics, **task_metrics}, sampler)
        return sampler or await self._make_sampler()

    async def _retry_from_checkpoint[T](self, train: Callable[[], Awaitable[T]], *, last_trained: int) -> T:
        """Train; if the service fails, recover the weights of the last trained step and retry."""
        for failures in range(_MAX_RECOVERIES + 1):
            try:
                if failures:
                    self.run.note(f"recovering the weights of step {last_trained} from the last checkpoint")
                    await self._recover(last_trained)
                return await train()
            except ServiceError as error:
                if failures == _MAX_RECOVERIES or self.watch.is_service_gone:
                    raise
                self.run.note(str(error))
        raise AssertionError("the last failure is raised")

    async def _recover(self, step: int, *, with_reports: bool = True) -> None:
        """Restore the weights of a step from a checkpoint, and repeat the requests of later steps."""
        self._is_recovering = True
        self.cancel_requests()
        # Without reports, missing reports do not matter, and a report that cannot be written must not prevent a save.
        newest_tried = self.run.reporter.complete_through(step) if with_reports else step
        self.learner, self.step = await self.watch.call(
            lambda: self.load_weights(newest_tried), "loading weights", retry=True
        )
        self.run.checkpoints.resume_from(self.step, newest_tried=newest_tried)
        self.groups.sampler = await self._replay_through(step, None, with_reports=with_reports)
        self._is_recovering = False
        for update in self._updates:
            update.resubmit(self.learner)
            if update.is_finished:
                update.checkpoint = self._request_checkpoint(update.version)

    async def _make_sampler(self) -> PatientSampler:
        """Return a sampler of the service's present weights."""
        learner, step, watch = self.learner, self.step, self.watch
        sampler = await watch.call(lambda: learner.sampler(step), "handing over weights", retry=True)
        return PatientSampler(sampler, watch, step)

    def _request_checkpoint(self, step: int) -> PendingCheckpoint | None:
        is_evaluated = self.run.evaluation.is_due(step, last=self.run.steps)
        return self.run.checkpoints.request_if_due(self.learner, step, is_evaluated=is_evaluated)
