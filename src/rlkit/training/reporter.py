"""Reports of the steps of a run: to its directory, its trackers and the selection of weights, in order.

Invariant: steps are reported in their order and each once; a step whose evaluation still runs holds back the reports
behind it, but not the training. A finding is told when it begins, and not at every step of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from rlkit.errors import RunFailed
from rlkit.metrics.diagnostics import Lookout
from rlkit.metrics.metrics import HEALTHY_KL, departure
from rlkit.store import RunStore
from rlkit.trackers import Broadcast
from rlkit.training.checkpoints import Saver
from rlkit.training.model_selection import Selection


@dataclass(slots=True, eq=False)
class _Report:
    step: int
    metrics: Mapping[str, float]
    evaluation: asyncio.Task[Mapping[str, float]] | None


class Reporter:
    """Reports steps.

    Args:
        store: gets a line of metrics.
        trackers: are told.
        checkpoints: those that need not be kept are deleted once a step is reported.
        selection: compares the steps.
    """

    def __init__(self, store: RunStore, trackers: Broadcast, *, checkpoints: Saver, selection: Selection) -> None:
        self._store = store
        self._trackers = trackers
        self._checkpoints = checkpoints
        self._selection = selection
        self._pending: deque[_Report] = deque()
        self._failure: Exception | None = None
        self._lookout = Lookout()
        self._apart = False
        for step, metrics in store.read_metrics():  # what was told before the run was resumed
            self._lookout.add(step, metrics)
            self._apart = self._beyond(metrics)
        self.last: Mapping[str, float] = {}
        """Metrics of the last step that was reported."""
        self.enough = selection.enough
        """Why more training is of no use; None while it may be. Once there is a reason, it stays."""

    def add(
        self, step: int, metrics: Mapping[str, float], evaluation: asyncio.Task[Mapping[str, float]] | None = None
    ) -> None:
        """Report a step, at once or when its evaluation is done.

        Raises:
            Exception: the report, or an earlier one, could not be made.
        """
        self._pending.append(_Report(step, metrics, evaluation))
        if evaluation is not None:
            evaluation.add_done_callback(lambda _: self._flush())
        self._flush()
        self.check()

    def knows(self, step: int) -> bool:
        """Whether a step is reported, or waits for that."""
        return self._store.has_metrics(step) or any(report.step == step for report in self._pending)

    def known_through(self, step: int) -> int:
        """The last step up to `step` before which none is missing."""
        return next(
            (
                number - 1
                for number in range(self._store.find_last_measured_step(step) + 1, step + 1)
                if not self.knows(number)
            ),
            step,
        )

    def check(self) -> None:
        """Raise what went wrong with a report, if anything did."""
        if self._failure is not None:
            raise self._failure

    async def drain(self) -> None:
        """Wait until everything is reported.

        Raises:
            Exception: an evaluation failed, or a report could not be made.
        """
        while self._pending:
            evaluation = self._pending[0].evaluation
            if evaluation is not None:
                await asyncio.wait([evaluation])
            self._flush()
            self.check()
        self.check()

    def give_up(self) -> None:
        """Report what waits for an evaluation without it."""
        for report in self._pending:
            if report.evaluation is not None:
                report.evaluation.cancel()
                report.evaluation = None
        self._flush()

    async def close(self) -> None:
        """Give up evaluations that still run; what is ready before them is reported."""
        running = [report.evaluation for report in self._pending if report.evaluation is not None]
        for evaluation in running:
            evaluation.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _flush(self) -> None:
        while self._failure is None and self._pending:
            report = self._pending[0]
            if report.evaluation is not None and not report.evaluation.done():
                return
            self._pending.popleft()
            try:
                found: Mapping[str, float] = {} if report.evaluation is None else _result(report.evaluation)
                self.last = {**report.metrics, **found}
                if self.last and not self._store.has_metrics(report.step):
                    self._store.add_metrics(report.step, self.last)
                    self._trackers.step(report.step, self.last)
                    self._select(report.step, self.last)
                    self._warn(report.step, self.last)
            except Exception as error:  # told to the loop at its next look
                self._failure = error

    def _select(self, step: int, metrics: Mapping[str, float]) -> None:
        self._selection.tell(step, metrics)
        self._checkpoints.tidy_up(reported=step)
        if self.enough is None and (reason := self._selection.enough) is not None:
            self.enough = reason
            self._trackers.note(f"{reason}; ending the run")

    def _warn(self, step: int, metrics: Mapping[str, float]) -> None:
        apart = self._beyond(metrics)
        if apart and not self._apart:
            self._trackers.note(
                f"step {step}: KL(sampler‖trainer) is {departure(metrics):.2g} nats a token, and healthy runs stay "
                f"below {HEALTHY_KL}: lower the learning rate, schedule.max_staleness or batch.substeps"
            )
        self._apart = apart
        for finding in self._lookout.add(step, metrics):
            self._trackers.note(f"step {step}: {finding}")

    def _beyond(self, metrics: Mapping[str, float]) -> bool:
        """Whether sampler and trainer are too far apart; as before in a step without anything to learn."""
        kl = departure(metrics)
        return self._apart if kl is None else kl > HEALTHY_KL


def _result(evaluation: asyncio.Task[Mapping[str, float]]) -> Mapping[str, float]:
    if evaluation.cancelled():
        raise RunFailed("an evaluation was given up")
    return evaluation.result()
