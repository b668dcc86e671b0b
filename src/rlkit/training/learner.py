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
from rlkit.training.step import Recipe, StepUpdate

_RECOVERIES_MAX = 20


@dataclass(slots=True, eq=False)
class _Submission:
    """A step, the requests that are made of it, and the checkpoint of its weights if one was requested."""

    step: PendingStep
    update: StepUpdate
    checkpoint: asyncio.Future[tuple[str, str]] | None = None


class PolicyLearner:
    """Trains the weights of a run.

    A step whose groups are there is submitted behind the one that the service still works on, so that the service does
    not wait between steps.

    Args:
        run: its record, checkpoints and progress.
        groups: of the run; what was recorded of an earlier step is prepared by them again.
        recipe: how requests are made of groups.
        watch: over the calls to the service.
        loader: loads the weights again when the service fails.
        learner: the service's handle of the weights.
        step: that these weights are of.
    """

    def __init__(
        self,
        run: Run,
        groups: Groups,
        *,
        recipe: Recipe,
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
        self._complete: asyncio.Queue[PendingStep | None] = asyncio.Queue()
        self._submitting: asyncio.Task[None] | None = None
        self._is_recovering = False

    @property
    def pending_usage(self) -> Usage:
        """Usage of the gradients that steps have groups for and the service has not computed yet."""
        tokens = sum(submission.update.untrained for submission in self._submissions)
        return Usage(trained_tokens=tokens * self._recipe.loss.passes)

    async def replay(self) -> None:
        """Make the weights of the run's last step again, from the newest checkpoint and the groups on the disk.

        Raises:
            ServiceError: the service failed, again and again or for too long.
            UsageError: the groups of a step are not on the disk any more.
        """
        run, published = self._run, self._groups.published
        run.checkpoints.go_on(self._step, tried=run.store.find_last_measured_step(run.step))
        if self._step == 0 and run.evaluation.due(0, last=run.steps):
            published.set(await self._hand_over())
            if run.store.first_metrics_step is None:  # an evaluation that is new to the run begins where it is
                run.begin_report(0, {}, published.newest)
        while published.sampler is None or self._step < run.step:
            await self._replay_next()
            if run.stop.requested:  # the steps after this one are on the disk, to be replayed another time
                run.step = self._step
        self._groups.publish(published.newest)

    async def submit(self, steps: AsyncGenerator[PendingStep]) -> AsyncGenerator[PendingStep]:
        """Request the gradients of steps as their groups come, and yield each step once all of it is requested.

        A run that is asked to end begins no further step, and finishes those whose weights the service may have begun.

        Raises:
            EnvironmentFault: an advantage estimator, or a task source, failed.
            RolloutsFailed: too many groups in a row were of no use.
            RunFailed: the disk is full, or there were no tasks at all.
        """
        run = self._run
        run.start_timer()
        run.phase = "sampling"
        self._submitting = asyncio.create_task(self._submit_steps(steps))
        while (step := await self._complete.get()) is not None:
            run.phase = "training"
            yield step
            run.phase = "sampling"
            step.groups.clear()  # they are on the disk, and would be held until the next step is there
            if run.is_ending and self._complete.empty() and not self._is_ahead:
                return
        await self._submitting  # raises what ended it

    async def train(self, step: PendingStep) -> TrainedStep:
        """Wait for the weights of a step that was submitted; when the service fails, make them again.

        Raises:
            ServiceError: the service failed, again and again or for too long.
        """
        submission, published = self._submissions[0], self._groups.published
        sampler, metrics = await self._retry_from_checkpoint(
            lambda: self._await_update(step.number, step.groups, submission.update, before=published.newest),
            after=step.number - 1,
        )
        self._submissions.popleft()
        self._step = self._run.step = step.number  # the weights have moved, whether or not that can be written down
        return TrainedStep(sampler, metrics, submission.checkpoint)

    async def save(self) -> None:
        """Save the weights of the last trained step; what was begun after it is given up.

        Raises:
            RlkitError: the service failed after retries, or refused.
            RunFailed: the checkpoint cannot be written down.
        """
        if self._is_ahead:  # by some optimiser steps of a step that does not come about
            self.withdraw()
            self._submissions.clear()
            await self._recover(self._step, reports=False)  # a report that cannot be written must not prevent the save
        await self._run.checkpoints.save(self._learner, self._step)

    async def stop_submitting(self) -> None:
        """Submit nothing more."""
        if self._submitting is not None:
            self._submitting.cancel()
            await asyncio.gather(self._submitting, return_exceptions=True)

    def withdraw(self) -> None:
        """Ask for nothing more of the steps that are submitted, and wait for nothing that was requested.

        The learner is of no use after that: what is requested next may wait for the turn of what was given up.
        """
        for submission in self._submissions:
            submission.update.withdraw()
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
        return any(submission.update.stepped for submission in self._submissions)

    async def _submit_steps(self, steps: AsyncGenerator[PendingStep]) -> None:
        try:
            async with aclosing(steps):
                async for step in steps:
                    if self._run.is_ending:
                        return
                    submission = self._begin(step)
                    async for group in self._groups.fill(step):
                        submission.update.add(group.played.prepared, counts=group.is_trained)
                        del group
                        self._run.reporter.check()
                    if step.is_trainable:
                        await self._groups.sync()  # nothing is trained on that is not on the disk
                        self._finish(submission)
                        self._complete.put_nowait(step)
                    del step, submission  # or its episodes would be held until the next step is there
        finally:
            self._complete.put_nowait(None)

    def _begin(self, step: PendingStep) -> _Submission:
        learner = None if self._is_recovering else self._learner
        submission = _Submission(step, StepUpdate(learner, self._recipe, version=step.number))
        self._submissions.append(submission)
        return submission

    def _finish(self, submission: _Submission) -> None:
        """Request the weights of a step whose groups are there, and a checkpoint right behind them if one is due."""
        submission.update.finish()
        if not self._is_recovering:
            submission.checkpoint = self._request_checkpoint(submission.step.number)

    async def _await_update(
        self, number: int, groups: Sequence[StepGroup], update: StepUpdate, *, before: PatientSampler | None
    ) -> tuple[PatientSampler, dict[str, float]]:
        """Wait for the weights of a step; without anything to learn they are those of the step before."""
        played = [taken.played.prepared.group for taken in groups]
        # Of a million tokens, either would hold the event loop.
        metrics = await in_thread(lambda: group_metrics(played, prefix="env"))
        metrics |= await in_thread(lambda: batch_metrics(groups, version=number - 1))
        result = await update.result(self._watch)
        if result is None:
            self._run.note(f"step {number}: every group's rewards are equal, so there is nothing to learn")
            same = before or await self._hand_over()
            return PatientSampler(same.sampler, self._watch, number), {**metrics, "optim/skipped": 1.0}
        sampler, done = result
        agreement = await in_thread(update_metrics, done)
        return PatientSampler(sampler, self._watch, number), {**metrics, "optim/skipped": 0.0, **agreement}

    async def _replay_next(self) -> None:
        """Train again on the next step of the run, if there is one, and save its weights if that is due."""
        run, published = self._run, self._groups.published
        step = min(self._step + 1, run.step)
        is_new = step > self._step
        # A recovery publishes the weights that it made, which is why the newest are asked for at each try.
        published.set(
            await self._retry_from_checkpoint(lambda: self._replay_through(step, published.sampler), after=step)
        )
        if is_new and not run.checkpoints.has(step) and (saving := self._request_checkpoint(step)) is not None:
            run.checkpoints.record(step, saving)  # or an interruption would cost all of the replay once more

    async def _replay_through(
        self, upto: int, sampler: PatientSampler | None, *, reports: bool = True
    ) -> PatientSampler:
        """Train on the recorded groups of the steps that the service's weights lack.

        Args:
            upto: the last of these steps.
            sampler: of the service's weights as they are, if there is one.
            reports: report the steps that were not reported.

        Returns:
            A sampler of the weights of that step. Until it is published, rollouts go on with the one that they have.
        """
        run = self._run
        for number in range(self._step + 1, upto + 1):
            run.note(f"taking step {number} again, without sampling")
            update, groups = StepUpdate(self._learner, self._recipe, version=number), list[StepGroup]()
            try:
                for recorded in await run.store.read_groups(number):
                    groups.append(StepGroup(await self._groups.prepare(recorded.group), recorded.is_trained))
                    update.add(groups[-1].played.prepared, counts=recorded.is_trained)
                update.finish()
                sampler, metrics = await self._await_update(number, groups, update, before=sampler)
            finally:
                update.withdraw()
            self._step = number
            if reports and not run.reporter.knows(number):
                run.begin_report(number, {**metrics, **self._groups.recorded_task_metrics(number)}, sampler)
        return sampler or await self._hand_over()

    async def _retry_from_checkpoint[T](self, train: Callable[[], Awaitable[T]], *, after: int) -> T:
        """Train from the weights of step `after` on; when the service fails, make them again and try once more."""
        for failures in range(_RECOVERIES_MAX + 1):
            try:
                if failures:
                    self._run.note(f"going back to the last checkpoint, to go on after step {after} from there")
                    await self._recover(after)
                return await train()
            except ServiceError as error:
                if failures == _RECOVERIES_MAX or self._watch.is_service_gone:
                    raise
                self._run.note(str(error))
        raise AssertionError("the last failure is raised")

    async def _recover(self, upto: int, *, reports: bool = True) -> None:
        """Make the weights of a step again from a checkpoint, and request the steps behind it anew."""
        self._is_recovering = True
        self.withdraw()
        begin = self._run.reporter.known_through(upto)
        self._learner, self._step = await self._watch.call(
            lambda: self._loader.load(begin), "loading weights", retry=True
        )
        self._groups.published.set(await self._replay_through(upto, None, reports=reports))
        self._is_recovering = False
        for submission in self._submissions:
            submission.update.submit_again(self._learner)
            if submission.update.finished:
                submission.checkpoint = self._request_checkpoint(submission.step.number)

    async def _hand_over(self) -> PatientSampler:
        """Return a sampler of the service's weights as they are."""
        learner, step, watch = self._learner, self._step, self._watch
        sampler = await watch.call(lambda: learner.sampler(step), "handing over weights", retry=True)
        return PatientSampler(sampler, watch, step)

    def _request_checkpoint(self, step: int) -> asyncio.Future[tuple[str, str]] | None:
        is_evaluated = self._run.evaluation.due(step, last=self._run.steps)
        saving = self._run.checkpoints.ask_if_due(self._learner, step, evaluated=is_evaluated)
        return None if saving is None else asyncio.ensure_future(saving)
