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
from rlkit.metrics.metrics import SOLVED, batch_metrics, group_metrics, update_metrics
from rlkit.service import Learner
from rlkit.service.watch import PatientSampler, ServiceWatch
from rlkit.token_records.updates import record_update
from rlkit.training.groups import Groups, PendingStep
from rlkit.training.resume import WeightsLoader
from rlkit.training.run import Run, TrainedStep
from rlkit.training.step import StepRecipe, StepUpdate

_MAX_RECOVERIES = 20


@dataclass(slots=True, eq=False)
class _Submission:
    """A step, its requests, and the requested checkpoint of its weights if there is one."""

    step: PendingStep
    update: StepUpdate
    checkpoint: asyncio.Future[tuple[str, str]] | None = None


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
    loader: WeightsLoader  # loads weights again if the service fails
    learner: Learner  # the service's handle of the weights
    step: int  # step of these weights
    _submissions: deque[_Submission] = field(default_factory=deque[_Submission])
    _complete_steps: asyncio.Queue[PendingStep | None] = field(default_factory=asyncio.Queue[PendingStep | None])
    _submitting: asyncio.Task[None] | None = None
    _is_recovering: bool = False
    _noted_skips: set[str] = field(default_factory=set[str])

    @property
    def pending_usage(self) -> Usage:
        """Usage of the gradients of submitted groups that the service has not computed yet."""
        tokens = sum(submission.update.untrained_tokens for submission in self._submissions)
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
            await self._replay_next()
            run.reporter.raise_failure()
            if run.stop.is_requested:  # later steps stay on the disk and are replayed on the next resumption
                run.step = self.step
        groups.publish(groups.newest_sampler)

    async def submit(self, steps: AsyncGenerator[PendingStep]) -> AsyncGenerator[PendingStep]:
        """Request the gradients of steps as their groups are ready, and yield each step once it is fully requested.

        After a request to stop, no step is begun; steps with requested optimiser steps are finished.

        Raises:
            EnvironmentFault: an advantage estimator or a task source failed.
            RolloutsFailed: too many groups in a row were unusable.
            RunFailed: the disk is full, or the environments have no tasks.
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
        """Wait for the weights of a submitted step; recover them if the service fails.

        Raises:
            ServiceError: the service failed repeatedly, or for too long.
        """
        submission, groups = self._submissions[0], self.groups
        sampler, metrics, recorded = await self._retry_from_checkpoint(
            lambda: self._wait_for_update(step.number, step.groups, submission.update, current=groups.newest_sampler),
            last_trained=step.number - 1,
        )
        self._submissions.popleft()
        self.step = self.run.step = step.number  # the weights have changed, even if that cannot be recorded
        return TrainedStep(sampler, metrics, recorded, submission.checkpoint)

    async def save(self) -> None:
        """Save the weights of the last trained step, unless they are saved; drop later steps.

        Raises:
            RlkitError: the service failed after retries, or the checkpoint cannot be recorded.
        """
        if await self.run.checkpoints.is_saved(self.step):
            return
        if self._is_ahead:  # the weights contain optimiser steps of a dropped step
            self.cancel_requests()
            self._submissions.clear()
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
        for submission in self._submissions:
            submission.update.cancel()
            if submission.checkpoint is not None:
                submission.checkpoint.cancel()
                submission.checkpoint = None

    @property
    def is_at_last_step(self) -> bool:
        """True if the service holds the weights of the run's last step; False during a recovery."""
        return self.step == self.run.step

    @property
    def _is_ahead(self) -> bool:
        """True if the service's weights may contain more than the last trained step."""
        return any(submission.update.has_optimizer_steps for submission in self._submissions)

    async def _submit_steps(self, steps: AsyncGenerator[PendingStep]) -> None:
        try:
            async with aclosing(steps):
                async for step in steps:
                    if self.run.is_ending:
                        return
                    learner = None if self._is_recovering else self.learner
                    submission = _Submission(step, StepUpdate(learner, self.recipe, version=step.number))
                    self._submissions.append(submission)
                    async for group in self.groups.fill(step):
                        submission.update.add(group.prepared, is_trained=group.is_trained)
                        del group
                        self.run.reporter.raise_failure()
                    if step.is_trainable:
                        await self.run.store.sync()  # train only on episodes that are on the disk
                        submission.update.finish()
                        if not self._is_recovering:
                            submission.checkpoint = self._request_checkpoint(step.number)
                        self._complete_steps.put_nowait(step)
                    del step, submission  # free the episodes before the next step is complete
        finally:
            self._complete_steps.put_nowait(None)

    async def _wait_for_update(
        self, step: int, groups: Sequence[StepGroup], update: StepUpdate, *, current: PatientSampler | None
    ) -> tuple[PatientSampler, dict[str, float], asyncio.Task[None]]:
        """Wait for the weights of a step; return their sampler, its metrics, and a task that records its sequences."""
        played = [group.prepared.group for group in groups]
        # For a million tokens, these calls would block the event loop.
        supervised = self.recipe.supervised
        metrics = await in_thread(
            lambda: (
                group_metrics(played, prefix="env", supervised=supervised)
                | batch_metrics(groups, version=step - 1, supervised=supervised)
            )
        )
        result = await update.wait(self.watch)
        prepared, estimators = [group.prepared for group in groups], self.groups.preparation.estimators
        recorded = record_update(self.run.store.directory, step, prepared, result and result[1], estimators=estimators)
        if result is None:
            self._note_skip(step, prepared)
            unchanged = current or await self._make_sampler()
            return PatientSampler(unchanged.sampler, self.watch, step), {**metrics, "optim/skipped": 1.0}, recorded
        sampler, update_result = result
        agreement = await in_thread(update_metrics, update_result)
        return PatientSampler(sampler, self.watch, step), {**metrics, "optim/skipped": 0.0, **agreement}, recorded

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

    async def _replay_next(self) -> None:
        """Replay the next step of the run, if there is one, and save its weights if a checkpoint is due."""
        run, groups = self.run, self.groups
        step = min(self.step + 1, run.step)
        is_new = step > self.step
        # Each try reads the current sampler, because a recovery publishes another one.
        groups.sampler = await self._retry_from_checkpoint(
            lambda: self._replay_through(step, groups.sampler), last_trained=step
        )
        if is_new and not run.checkpoints.is_recorded(step) and (pending := self._request_checkpoint(step)) is not None:
            run.checkpoints.record(step, pending)  # without it, an interruption would repeat the whole replay

    async def _replay_through(
        self, last_step: int, sampler: PatientSampler | None, *, with_reports: bool = True
    ) -> PatientSampler:
        """Train on the recorded groups of the steps that the service's weights lack, up to `last_step`.

        Args:
            sampler: sampler of the service's present weights, if there is one.
            with_reports: report the steps that were not reported.

        Returns:
            A sampler of the weights of `last_step`, not published yet.
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
                sampler, metrics, recorded = await self._wait_for_update(number, groups, update, current=sampler)
            finally:
                update.cancel()
            self.step = number
            await recorded
            if with_reports and not run.reporter.has_report(number):
                task_metrics = self.groups.recorded_task_metrics.get(number, {})
                run.begin_report(number, {**metrics, **task_metrics}, sampler)
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
            lambda: self.loader.load(newest_tried), "loading weights", retry=True
        )
        self.run.checkpoints.resume_from(self.step, newest_tried=newest_tried)
        self.groups.sampler = await self._replay_through(step, None, with_reports=with_reports)
        self._is_recovering = False
        for submission in self._submissions:
            submission.update.resubmit(self.learner)
            if submission.update.is_finished:
                submission.checkpoint = self._request_checkpoint(submission.step.number)

    async def _make_sampler(self) -> PatientSampler:
        """Return a sampler of the service's present weights."""
        learner, step, watch = self.learner, self.step, self.watch
        sampler = await watch.call(lambda: learner.sampler(step), "handing over weights", retry=True)
        return PatientSampler(sampler, watch, step)

    def _request_checkpoint(self, step: int) -> asyncio.Future[tuple[str, str]] | None:
        is_evaluated = self.run.evaluation.is_due(step, last=self.run.steps)
        pending = self.run.checkpoints.request_if_due(self.learner, step, is_evaluated=is_evaluated)
        return None if pending is None else asyncio.ensure_future(pending)
