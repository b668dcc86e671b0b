"""The learner of a run: gradients, optimiser steps and new weights, step by step, and again when the service fails.

Invariant: a step is made of the same groups, in the same order, however often it is made; the service's weights are
never further than the last trained step and the optimiser steps of those that are submitted behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from rlkit._util.threads import in_thread
from rlkit.algorithms.datums import StepGroup
from rlkit.cost.usage import Usage
from rlkit.errors import ServiceError
from rlkit.metrics.metrics import batch_metrics, group_metrics, update_metrics
from rlkit.service import Learner
from rlkit.service.watch import PatientSampler, ServiceWatch
from rlkit.training.groups import Groups, PendingStep
from rlkit.training.resume import WeightsLoader
from rlkit.training.run import Run, TrainedStep
from rlkit.training.step import StepRecipe, StepUpdate

_MAX_RECOVERIES = 20


@dataclass(slots=True, eq=False)
class _Submission:
    """A step, its requests, and the checkpoint of its weights if one was requested."""

    step: PendingStep
    update: StepUpdate
    checkpoint: asyncio.Future[tuple[str, str]] | None = None


class PolicyLearner:
    """Learner of a run: it trains the weights step by step.

    A step whose groups are there is submitted behind the one that the service still works on, so that the service does
    not wait between steps.

    Args:
        recipe: how requests follow from groups.
        watch: retries and limits calls to the service.
        loader: loads weights again when the service fails.
        learner: the service's handle of the weights.
        step: step of these weights.
    """

    def __init__(
        self,
        run: Run,
        groups: Groups,
        *,
        recipe: StepRecipe,
        watch: ServiceWatch,
        loader: WeightsLoader,
        learner: Learner,
        step: int,
    ) -> None:
        self._run = run
        self._groups = groups
        self._recipe = recipe
        self._watch = watch
        self._loader = loader
        self._learner = learner
        self._step = step
        self._submissions: deque[_Submission] = deque()
        self._complete_steps: asyncio.Queue[PendingStep | None] = asyncio.Queue()
        self._submitting: asyncio.Task[None] | None = None
        self._is_recovering = False

    @property
    def pending_usage(self) -> Usage:
        """Usage of the gradients that steps have groups for and the service has not computed yet."""
        tokens = sum(submission.update.untrained_tokens for submission in self._submissions)
        return Usage(trained_tokens=tokens * self._recipe.loss.passes)

    async def replay(self) -> None:
        """Make the weights of the run's last step, from the newest checkpoint and the groups on the disk.

        Raises:
            ServiceError: the service failed, again and again or for too long.
            UsageError: the groups of a step are not on the disk any more.
        """
        run, published = self._run, self._groups.published
        run.checkpoints.resume_from(self._step, newest_tried=run.store.find_last_measured_step(run.step))
        if self._step == 0 and run.evaluation.is_due(0, last=run.steps):
            published.set(await self._make_sampler())
            if run.store.first_metrics_step is None:  # one that a resume adds begins where the run is
                run.begin_report(0, {}, published.newest)
        while published.sampler is None or self._step < run.step:
            await self._replay_next()
            run.reporter.raise_failure()
            if run.stop.is_requested:  # the steps after this one are on the disk, to be replayed another time
                run.step = self._step
        self._groups.publish(published.newest)

    async def submit(self, steps: AsyncGenerator[PendingStep]) -> AsyncGenerator[PendingStep]:
        """Request the gradients of steps as their groups come, and yield each step once all of it is requested.

        A run that is asked to end begins no further step, and finishes those whose optimiser steps are requested.

        Raises:
            EnvironmentFault: an advantage estimator, or a task source, failed.
            RolloutsFailed: too many groups in a row were unusable.
            RunFailed: the disk is full, or there were no tasks at all.
        """
        run = self._run
        run.start_timer()
        run.phase = "sampling"
        self._submitting = asyncio.create_task(self._submit_steps(steps))
        while (step := await self._complete_steps.get()) is not None:
            run.phase = "training"
            yield step
            run.phase = "sampling"
            step.groups.clear()  # they are on the disk, and would be held until the next step is there
            if run.is_ending and self._complete_steps.empty() and not self._is_ahead:
                return
        await self._submitting  # raises its exception

    async def train(self, step: PendingStep) -> TrainedStep:
        """Wait for the weights of a step that was submitted; recover them when the service fails.

        Raises:
            ServiceError: the service failed, again and again or for too long.
        """
        submission, published = self._submissions[0], self._groups.published
        sampler, metrics = await self._retry_from_checkpoint(
            lambda: self._wait_for_update(step.number, step.groups, submission.update, current=published.newest),
            last_trained=step.number - 1,
        )
        self._submissions.popleft()
        self._step = self._run.step = step.number  # the weights have moved, whether or not that can be recorded
        return TrainedStep(sampler, metrics, submission.checkpoint)

    async def save(self) -> None:
        """Save the weights of the last trained step, unless they are saved; steps that were begun after it are dropped.

        Raises:
            RlkitError: the service failed after retries, or refused.
            RunFailed: the checkpoint cannot be recorded.
        """
        if await self._run.checkpoints.is_saved(self._step):
            return
        if self._is_ahead:  # by some optimiser steps of a step that is dropped
            self.withdraw()
            self._submissions.clear()
            await self._recover(self._step, with_reports=False)
        await self._run.checkpoints.save(self._learner, self._step)

    async def stop_submitting(self) -> None:
        """Submit no more steps."""
        if self._submitting is not None:
            self._submitting.cancel()
            await asyncio.gather(self._submitting, return_exceptions=True)

    def withdraw(self) -> None:
        """Cancel all requests of the submitted steps.

        The learner is of no use after that: new requests may wait for the turn of cancelled ones.
        """
        for submission in self._submissions:
            submission.update.cancel()
            if submission.checkpoint is not None:
                submission.checkpoint.cancel()
                submission.checkpoint = None

    @property
    def is_at_last_step(self) -> bool:
        """True where the service holds the weights of the run's last step; False in the middle of a recovery."""
        return self._step == self._run.step

    @property
    def _is_ahead(self) -> bool:
        """True where the service's weights may be further than the last trained step."""
        return any(submission.update.has_optimizer_steps for submission in self._submissions)

    async def _submit_steps(self, steps: AsyncGenerator[PendingStep]) -> None:
        try:
            async with aclosing(steps):
                async for step in steps:
                    if self._run.is_ending:
                        return
                    learner = None if self._is_recovering else self._learner
                    submission = _Submission(step, StepUpdate(learner, self._recipe, version=step.number))
                    self._submissions.append(submission)
                    async for group in self._groups.fill(step):
                        submission.update.add(group.played.prepared, is_trained=group.is_trained)
                        del group
                        self._run.reporter.raise_failure()
                    if step.is_trainable:
                        await self._groups.sync()  # nothing is trained on that is not on the disk
                        submission.update.finish()
                        if not self._is_recovering:
                            submission.checkpoint = self._request_checkpoint(step.number)
                        self._complete_steps.put_nowait(step)
                    del step, submission  # or its episodes would be held until the next step is there
        finally:
            self._complete_steps.put_nowait(None)

    async def _wait_for_update(
        self, number: int, groups: Sequence[StepGroup], update: StepUpdate, *, current: PatientSampler | None
    ) -> tuple[PatientSampler, dict[str, float]]:
        """Wait for the weights of a step; if nothing is learned, they are the current ones."""
        played = [group.played.prepared.group for group in groups]
        # Each call takes so long for a million tokens that it would block the event loop.
        metrics = await in_thread(lambda: group_metrics(played, prefix="env"))
        metrics |= await in_thread(lambda: batch_metrics(groups, version=number - 1))
        result = await update.wait(self._watch)
        if result is None:
            self._run.note(f"step {number}: every group's rewards are equal, so there is nothing to learn")
            unchanged = current or await self._make_sampler()
            return PatientSampler(unchanged.sampler, self._watch, number), {**metrics, "optim/skipped": 1.0}
        sampler, update_result = result
        agreement = await in_thread(update_metrics, update_result)
        return PatientSampler(sampler, self._watch, number), {**metrics, "optim/skipped": 0.0, **agreement}

    async def _replay_next(self) -> None:
        """Replay the next step of the run, if there is one, and save its weights if that is due."""
        run, published = self._run, self._groups.published
        step = min(self._step + 1, run.step)
        is_new = step > self._step
        # A recovery publishes the weights that it made, which is why the current sampler is asked for at each try.
        published.set(
            await self._retry_from_checkpoint(lambda: self._replay_through(step, published.sampler), last_trained=step)
        )
        if is_new and not run.checkpoints.is_recorded(step) and (pending := self._request_checkpoint(step)) is not None:
            run.checkpoints.record(step, pending)  # or an interruption would cost all of the replay once more

    async def _replay_through(
        self, last_step: int, sampler: PatientSampler | None, *, with_reports: bool = True
    ) -> PatientSampler:
        """Train on the recorded groups of the steps that the service's weights lack.

        Args:
            last_step: last of these steps.
            sampler: sampler of the service's weights as they are, if there is one.
            with_reports: report the steps that were not reported.

        Returns:
            A sampler of the weights of that step. Until it is published, rollouts go on with the one that they have.
        """
        run = self._run
        for number in range(self._step + 1, last_step + 1):
            run.note(f"replaying step {number} from its recorded groups, without sampling")
            update, groups = StepUpdate(self._learner, self._recipe, version=number), list[StepGroup]()
            try:
                for recorded in await run.store.read_groups(number):
                    groups.append(StepGroup(await self._groups.prepare(recorded.group), recorded.is_trained))
                    update.add(groups[-1].played.prepared, is_trained=recorded.is_trained)
                update.finish()
                sampler, metrics = await self._wait_for_update(number, groups, update, current=sampler)
            finally:
                update.cancel()
            self._step = number
            if with_reports and not run.reporter.has_report(number):
                run.begin_report(number, {**metrics, **self._groups.recorded_task_metrics(number)}, sampler)
        return sampler or await self._make_sampler()

    async def _retry_from_checkpoint[T](self, train: Callable[[], Awaitable[T]], *, last_trained: int) -> T:
        """Train; when the service fails, recover the weights of the last trained step and try once more."""
        for failures in range(_MAX_RECOVERIES + 1):
            try:
                if failures:
                    self._run.note(f"recovering the weights of step {last_trained} from the last checkpoint")
                    await self._recover(last_trained)
                return await train()
            except ServiceError as error:
                if failures == _MAX_RECOVERIES or self._watch.is_service_gone:
                    raise
                self._run.note(str(error))
        raise AssertionError("the last failure is raised")

    async def _recover(self, step: int, *, with_reports: bool = True) -> None:
        """Make the weights of a step again from a checkpoint, and request the steps behind it again."""
        self._is_recovering = True
        self.withdraw()
        # Without reports, those that are missing do not matter, and what cannot be written must not prevent a save.
        newest_tried = self._run.reporter.complete_through(step) if with_reports else step
        self._learner, self._step = await self._watch.call(
            lambda: self._loader.load(newest_tried), "loading weights", retry=True
        )
        self._run.checkpoints.resume_from(self._step, newest_tried=newest_tried)
        self._groups.published.set(await self._replay_through(step, None, with_reports=with_reports))
        self._is_recovering = False
        for submission in self._submissions:
            submission.update.resubmit(self._learner)
            if submission.update.is_finished:
                submission.checkpoint = self._request_checkpoint(submission.step.number)

    async def _make_sampler(self) -> PatientSampler:
        """Return a sampler of the service's weights as they are."""
        learner, step, watch = self._learner, self._step, self._watch
        sampler = await watch.call(lambda: learner.sampler(step), "handing over weights", retry=True)
        return PatientSampler(sampler, watch, step)

    def _request_checkpoint(self, step: int) -> asyncio.Future[tuple[str, str]] | None:
        is_evaluated = self._run.evaluation.is_due(step, last=self._run.steps)
        pending = self._run.checkpoints.request_if_due(self._learner, step, is_evaluated=is_evaluated)
        return None if pending is None else asyncio.ensure_future(pending)
