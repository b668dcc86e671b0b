"""Reports of a run's steps to its directory, its trackers and the model selection.

Invariant: each step is reported once and in order. A running evaluation delays the reports of later steps, but not the
training. A finding is reported at its first step only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from rlkit._util.priority_semaphore import SlotsClosed
from rlkit.errors import RunFailed
from rlkit.metrics.diagnostics import FindingMonitor
from rlkit.metrics.metrics import DivergenceMonitor
from rlkit.store import RunStore
from rlkit.trackers import Broadcast
from rlkit.training.checkpoints import CheckpointSaver

type PendingEvaluation = asyncio.Task[Mapping[str, float]]


@dataclass(eq=False)
class Reporter:
    """The reports of a run; superfluous checkpoints are deleted after each report."""

    store: RunStore
    trackers: Broadcast
    checkpoints: CheckpointSaver

    def __post_init__(self) -> None:
        self._pending: deque[tuple[int, Mapping[str, float], PendingEvaluation | None]] = deque()
        self._failure: Exception | None = None
        self._findings = FindingMonitor()
        self._divergence = DivergenceMonitor()
        for step, metrics in self.store.read_metrics():  # reported by earlier processes
            self._findings.add(step, metrics)
            self._divergence.add(metrics)
        self.last_metrics: Mapping[str, float] = {}
        self.end_reason = self.checkpoints.selection.end_reason  # first reason to end the run; None to continue

    def add(self, step: int, metrics: Mapping[str, float], evaluation: PendingEvaluation | None = None) -> None:
        """Report a step when its evaluation and all earlier reports are done; `raise_failure` raises the errors."""
        self._pending.append((step, metrics, evaluation))
        if evaluation is not None:
            evaluation.add_done_callback(lambda _: self._flush())
        self._flush()

    def has_report(self, step: int) -> bool:
        """Return whether a step is reported, or waits for its evaluation."""
        return step in self.store.measured_steps or any(number == step for number, _, _ in self._pending)

    def complete_through(self, step: int) -> int:
        """Return the last step up to `step` before which no report is missing."""
        first = self.store.find_last_measured_step(step)
        return first + sum(1 for _ in takewhile(self.has_report, range(first + 1, step + 1)))

    def raise_failure(self) -> None:
        """Raise the exception of a failed evaluation or of a report that could not be written."""
        if self._failure is not None:
            raise self._failure

    async def drain(self) -> None:
        """Wait until every step is reported; raises as `raise_failure` does."""
        while self._pending and self._failure is None:
            _, _, evaluation = self._pending[0]
            if evaluation is not None:
                await asyncio.wait([evaluation])
            self._flush()
        self.raise_failure()

    async def close(self) -> None:
        """Cancel the running evaluations."""
        evaluations = [evaluation for _, _, evaluation in self._pending if evaluation is not None]
        for evaluation in evaluations:
            evaluation.cancel()
        await asyncio.gather(*evaluations, return_exceptions=True)

    def _flush(self) -> None:
        while self._failure is None and self._pending:
            step, step_metrics, evaluation = self._pending[0]
            if evaluation is not None and not evaluation.done():
                return
            self._pending.popleft()
            try:
                scores: Mapping[str, float] = {} if evaluation is None else _result(evaluation)
                self.last_metrics = metrics = {**step_metrics, **scores}
                if metrics and step not in self.store.measured_steps:
                    self.store.add_metrics(step, metrics)
                    self.trackers.on_step(step, metrics)
                    self._assess(step, metrics)
            except Exception as error:  # raised by `raise_failure`
                self._failure = error

    def _assess(self, step: int, metrics: Mapping[str, float]) -> None:
        """Select checkpoints by a reported step, and note what it shows about the run."""
        self.checkpoints.selection.add(step, metrics)
        self.checkpoints.delete_superfluous(last_step=step)
        if self.end_reason is None and (reason := self.checkpoints.selection.end_reason) is not None:
            self.end_reason = reason
            self.trackers.on_note(f"{reason}; ending the run")
        if (problem := self._divergence.add(metrics)) is not None:
            self.trackers.on_note(f"step {step}: {problem}")
        for finding in self._findings.add(step, metrics):
            self.trackers.on_note(f"step {step}: {finding}")


def _result(evaluation: PendingEvaluation) -> Mapping[str, float]:
    """Return the metrics of an evaluation; none if the budget ended before it was complete."""
    if evaluation.cancelled():
        raise RunFailed("an evaluation was cancelled")
    return {} if isinstance(evaluation.exception(), SlotsClosed) else evaluation.result()
