"""A run: its progress, reports, evaluations, checkpoints and result.

Invariant: the result of a run is recorded, and the run can be resumed, whatever ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from rlkit._util.activity import Activity
from rlkit._util.threads import in_thread
from rlkit.cost.estimate import Estimate
from rlkit.evaluation.evaluate import Evaluation, compute_eval_metrics
from rlkit.metrics.step_timer import StepTimer
from rlkit.policy import Sampler
from rlkit.service.watch import PatientSampler
from rlkit.trackers import Phase, Progress, RunResult
from rlkit.training import StopSignal
from rlkit.training.checkpoints import CheckpointSaver, PendingCheckpoint
from rlkit.training.groups import Groups, PendingStep
from rlkit.training.reporter import Reporter


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """Result of training on a step."""

    sampler: PatientSampler  # samples from the new weights
    metrics: Mapping[str, float]  # metrics of the groups, the batch and the update
    recorded: Awaitable[None]  # waits until the training sequences are on the disk
    checkpoint: PendingCheckpoint | None = None  # requested checkpoint of the new weights, if one is due


@dataclass(kw_only=True, eq=False)
class Run:
    """The parts that record a run, and the decision when it ends."""

    step: int  # last step whose groups are on the disk
    groups: Groups
    evaluation: Evaluation
    checkpoints: CheckpointSaver
    stop: StopSignal
    activity: Activity
    estimate: Estimate | None  # usage of the run as estimated by a dry run
    phase: Phase = "preparing"

    def __post_init__(self) -> None:
        self.first_step = self.step
        self.steps = self.groups.recipe.limits.steps
        self.store, self.trackers, self.note = self.groups.store, self.groups.trackers, self.groups.trackers.on_note
        self.reporter = Reporter(self.store, self.trackers, self.checkpoints)
        self.slots = self.groups.player.slots  # limit on running rollouts; closes once the budget is used up
        self.timer = StepTimer(self.slots)
        self._started_s = time.monotonic()
        self._warm_up_s = 0.0

    @property
    def is_ending(self) -> bool:
        """True if no further step is begun."""
        return self.stop.is_requested or self.reporter.end_reason is not None

    async def report(self, step: PendingStep, trained: TrainedStep) -> None:
        """Record the usage and metrics of a step, and begin to evaluate its weights if an evaluation is due.

        Errors of earlier reports and evaluations are raised here.
        """
        self._warm_up_s = self._warm_up_s or time.monotonic() - self._started_s
        usage = self.groups.budget.metrics()  # before any await, so that a slow disk does not change it
        await trained.recorded
        if trained.checkpoint is not None:
            self.checkpoints.record(step.number, trained.checkpoint)
        await in_thread(self.groups.budget.write)
        times = self.timer.lap(step.complete_s, trained.metrics)
        metrics = {**usage, **trained.metrics, **step.task_metrics, **times, **self.groups.player.runner.metrics()}
        self.begin_report(step.number, metrics, trained.sampler)
        self.reporter.raise_failure()

    def begin_report(self, step: int, metrics: Mapping[str, float], sampler: Sampler) -> None:
        """Report a step, after the evaluation of its weights if an evaluation is due."""
        evaluation = None
        is_due = self.evaluation.is_due(step, last=self.steps)
        rank = self.groups.sources.draws + self.groups.recipe.limits.groups  # after the groups of the next step
        is_wanted = self.evaluation.tasks and step not in self.store.measured_steps and self.slots.close_reason is None
        if is_wanted and (is_due or self.groups.supply.are_all_drawn):
            evaluation = asyncio.create_task(self._evaluate(step, sampler, rank, only_if_last=not is_due))
        self.reporter.add(step, {**self.groups.budget.metrics(), **metrics}, evaluation)

    def progress(self) -> Progress:
        """Return the progress of the run; may be called from any thread."""
        trained, evaluated = self.groups.player.counts, self.evaluation.player.counts
        counts = replace(evaluated if self.phase == "evaluating" else trained)
        counts.tokens = trained.tokens + evaluated.tokens
        counts.newest_error = self.store.metadata.redact(counts.newest_error)
        return Progress(
            step=self.step,
            steps=self.steps,
            phase=self.phase,
            **asdict(counts),
            seconds=time.monotonic() - self._started_s,
            first_step=self.first_step,
            warm_up_s=self._warm_up_s,
            activity=str(self.activity),
        )

    async def finish(self) -> None:
        """Wait until every step is reported and on the disk; raises as `report` does."""
        self.phase = "evaluating"
        await self.reporter.drain()
        self.phase = "saving"
        self.checkpoints.delete_superfluous(last_step=self.step)
        await self.checkpoints.wait_for_deletions()
        await self.store.flush()
        metric = self.checkpoints.selection.criterion.metric
        if metric is not None and self.checkpoints.selection.best is None and self.step:
            self.note(f"the best checkpoint is unknown, because no step has the metric {metric} (best.metric)")
        self.phase = "done"

    async def close(self) -> None:
        """Cancel pending evaluations and checkpoints."""
        await self.reporter.close()
        self.checkpoints.close()

    @cached_property
    def result(self) -> RunResult:
        """Result of the run at the first access."""
        budget_reason = self.slots.close_reason
        status = "budget" if budget_reason else "interrupted" if self.stop.is_requested else "completed"
        return RunResult(
            name=self.store.directory.name,
            directory=self.store.directory,
            status=status if self.step < self.steps else "completed",
            steps=self.step,
            metrics=self.reporter.last_metrics,
            checkpoint=self.checkpoints.newest,
            reason=budget_reason or self.reporter.end_reason or "",
            best_checkpoint=self.checkpoints.selection.best_checkpoint(self.checkpoints.usable),
            spending=self.groups.budget.spending,
            estimate=self.estimate,
        )

    async def _evaluate(self, step: int, sampler: Sampler, rank: int, *, only_if_last: bool) -> Mapping[str, float]:
        """Evaluate the weights of a step; with `only_if_last`, only if the running groups make no further step."""
        is_last = not only_if_last or await self.groups.is_last(step)
        if only_if_last and (not is_last or self.is_ending or self.slots.close_reason is not None):
            return {}
        results = await self.evaluation.play(sampler, rank=rank)
        await self.store.write_evaluation(step, results)
        groups = [group for group, _ in results]
        return {**await compute_eval_metrics(groups), **await self.evaluation.measure_divergence(groups)}
