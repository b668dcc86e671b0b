"""A run as its directory and its trackers know it: progress, reports, evaluations, checkpoints and the result.

Invariant: whatever ends the run, the directory says how it ended and can be resumed from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rlkit._util.activity import Activity
from rlkit._util.priority_semaphore import Slots
from rlkit._util.threads import in_thread
from rlkit.cost.budget import Budget
from rlkit.cost.estimate import Estimate
from rlkit.evaluation.evaluate import Evaluation, eval_metrics
from rlkit.metrics.metrics import throughput
from rlkit.policy import Sampler
from rlkit.service.watch import PatientSampler
from rlkit.store import RunStore
from rlkit.store.usage_log import UsageLog
from rlkit.trackers import Broadcast, Phase, Progress, RunResult
from rlkit.training import StopSignal
from rlkit.training.checkpoints import Saver, Saving
from rlkit.training.groups import Groups, PendingStep
from rlkit.training.model_selection import Selection
from rlkit.training.reporter import Reporter


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """Result of training on a step.

    Args:
        sampler: samples from the new weights.
        metrics: of the groups, the batch and the update.
        checkpoint: the checkpoint that was requested right behind the step, if one was.
    """

    sampler: PatientSampler
    metrics: Mapping[str, float]
    checkpoint: Saving | None = None


class Run:
    """The record of a run, and the decision when it ends.

    Args:
        steps: of the run in all.
        step: the last one whose groups are on the disk.
        store: its directory.
        trackers: told of every step.
        groups: the groups that are played for it.
        evaluation: of the weights of some steps.
        checkpoints: saves weights.
        selection: says which weights are the best, and when more training is of no use.
        stop: asks the run to end.
        slots: of all rollouts; they give no more places once the budget is used up.
        budget: of the run.
        usage: writes down what the budget counts.
        activity: counts of the work under way.
        estimate: of the run's usage, by a dry run before it.
    """

    def __init__(
        self,
        *,
        steps: int,
        step: int,
        store: RunStore,
        trackers: Broadcast,
        groups: Groups,
        evaluation: Evaluation,
        checkpoints: Saver,
        selection: Selection,
        stop: StopSignal,
        slots: Slots,
        budget: Budget,
        usage: UsageLog,
        activity: Activity,
        estimate: Estimate | None,
    ) -> None:
        self.steps = steps
        self.step = self.first_step = step
        self.phase: Phase = "preparing"
        self.store = store
        self.evaluation = evaluation
        self.checkpoints = checkpoints
        self.stop = stop
        self.note = trackers.note
        self._groups = groups
        self._selection = selection
        self._slots = slots
        self._budget = budget
        self._usage = usage
        self._activity = activity
        self._estimate = estimate
        self.reporter = Reporter(store, trackers, checkpoints=checkpoints, selection=selection)
        self._started_s = time.monotonic()
        self._timer = _StepTimer(slots)
        self._used_up = ""

    def start_timer(self) -> None:
        """Count the time of the next step from now on."""
        self._timer.start()

    @property
    def is_ending(self) -> bool:
        """True where no further step is to be begun."""
        return self.stop.requested or self.reporter.enough is not None

    async def end_with_budget(self) -> None:
        """Wait until the budget is used up, and then end the run: what is being played is finished and kept."""
        await self._slots.wait_until_drained()
        self._used_up = str(self._budget.reached)
        self.note(f"{self._used_up}; ending the run")
        self.reporter.give_up()
        self._groups.end()

    async def report(self, step: PendingStep, trained: TrainedStep) -> None:
        """Write down what a step used and came to, and begin to evaluate its weights if that is due.

        Raises:
            RunFailed: the disk is full.
            Exception: an earlier report, or an evaluation, failed.
        """
        used = self._budget.metrics()
        if trained.checkpoint is not None:
            self.checkpoints.record(step.number, trained.checkpoint)
        await in_thread(self._usage.write)
        times = self._timer.lap(step.complete_s, trained.metrics)
        self.begin_report(step.number, {**trained.metrics, **step.task_metrics, **used, **times}, trained.sampler)

    def begin_report(self, step: int, metrics: Mapping[str, float], sampler: Sampler) -> None:
        """Report a step, once the evaluation of its weights is there if one is due.

        Raises:
            Exception: this report, or an earlier one, could not be made.
        """
        evaluation = None
        is_wanted = self.evaluation.tasks and not self.store.has_metrics(step) and not self._used_up
        if is_wanted and self.evaluation.due(step, last=self.steps):
            if step in (0, self.steps):
                self.phase = "evaluating"
            evaluation = asyncio.create_task(self._evaluate(step, sampler, self._groups.rank_after_next_step))
        elif is_wanted and self._groups.are_all_drawn:
            evaluation = asyncio.create_task(self._evaluate_if_last(step, sampler, self._groups.rank_after_next_step))
        self.reporter.add(step, {**self._budget.metrics(), **metrics}, evaluation)

    def progress(self) -> Progress:
        """Return where the run stands; may be called from any thread."""
        trained, evaluated = self._groups.counts, self.evaluation.player.counts
        counts = evaluated if self.phase == "evaluating" else trained
        return Progress(
            step=self.step,
            steps=self.steps,
            phase=self.phase,
            queued=counts.queued,
            live=counts.live,
            done=counts.done,
            failed=counts.failed,
            tokens=trained.tokens + evaluated.tokens,
            seconds=time.monotonic() - self._started_s,
            first_step=self.first_step,
            work=str(self._activity),
        )

    async def finish(self) -> None:
        """Wait until everything is reported and on the disk.

        Raises:
            RunFailed: the disk is full.
            Exception: a report, or an evaluation, failed.
        """
        await self.reporter.drain()
        self.checkpoints.tidy_up(reported=self.step)
        await self.checkpoints.settle()
        await self.store.flush()
        metric = self._selection.aim.metric
        if metric is not None and self._selection.best is None and self.step:
            self.note(f"best.metric: no step had a {metric}")
        self.phase = "done"

    async def close(self) -> None:
        """Give up evaluations and checkpoints that are not there yet."""
        await self.reporter.close()
        self.checkpoints.close()

    @cached_property
    def result(self) -> RunResult:
        """Result of the run, as it was when this was first asked for."""
        end = "budget" if self._used_up else "interrupted" if self.stop.requested else "completed"
        return RunResult(
            name=self.store.directory.name,
            directory=self.store.directory,
            status=end if self.step < self.steps else "completed",
            steps=self.step,
            metrics=self.reporter.last,
            checkpoint=self.checkpoints.newest,
            reason=self._used_up or self.reporter.enough or "",
            best=self._selection.best_of(self.checkpoints.usable),
            spent=self._budget.spent,
            estimate=self._estimate,
        )

    async def _evaluate(self, step: int, sampler: Sampler, rank: int) -> Mapping[str, float]:
        tried = await self.evaluation.play(sampler, rank=rank)
        await self.store.write_evaluation(step, [(one.group, one.attempts) for one in tried])
        return await eval_metrics(tried)

    async def _evaluate_if_last(self, step: int, sampler: Sampler, rank: int) -> Mapping[str, float]:
        """Evaluate a step if none of the groups that are still in play makes another one."""
        if not await self._groups.is_last(step) or self.is_ending or self._used_up:
            return {}
        self.phase = "evaluating"
        return await self._evaluate(step, sampler, rank)


class _StepTimer:
    """Time of each step, from the end of the step before.

    Args:
        slots: of all rollouts.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._clock = asyncio.get_running_loop().time
        self.start()

    def start(self) -> None:
        """Begin to count the time of the next step."""
        self._ended_s, self._busy_s = self._clock(), self._slots.busy_s

    def lap(self, complete_s: float, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the times of the step that ends now, under `time/…`.

        Args:
            complete_s: when the last of its groups came.
            metrics: of the step.
        """
        before_s, busy_s = self._ended_s, self._busy_s
        self.start()
        seconds, busy_s = self._ended_s - before_s, self._busy_s - busy_s
        return {
            "time/sample_s": max(complete_s - before_s, 0.0),
            "time/train_s": self._ended_s - max(complete_s, before_s),
            "time/step_s": seconds,
            **throughput(metrics, seconds=seconds, busy_s=busy_s, slots=self._slots.count),
        }
