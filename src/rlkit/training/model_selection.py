"""Model selection: the best weights of a run, the checkpoints to keep, and an early end.

Invariant: every decision follows from the reported metrics alone, so that a resumed run decides as it would have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlkit.types import Checkpoint


@dataclass(frozen=True, slots=True)
class Criterion:
    """The metric by which the weights of steps are compared.

    Args:
        metric: name of the metric; None compares nothing.
        is_lower_better: smaller values are better.
        patience: end the run after this many values in a row without a gain; None never does.
        min_gain: smallest difference that counts as a gain.
        goal: end the run at this value; None never does.
    """

    metric: str | None = None
    is_lower_better: bool = False
    patience: int | None = None
    min_gain: float = 0.0
    goal: float | None = None


@dataclass(slots=True, eq=False)
class ModelSelection:
    """Comparison of the steps of a run.

    Args:
        criterion: metric to compare by.
        keep_last: newest checkpoints to keep; None for all.
        keep_best: checkpoints with the best values to keep besides.
    """

    criterion: Criterion
    keep_last: int | None = None
    keep_best: int = 0
    _values: dict[int, float] = field(default_factory=dict[int, float])

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step; they need not hold the criterion's metric."""
        value = None if self.criterion.metric is None else metrics.get(self.criterion.metric)
        if value is not None and math.isfinite(value):
            self._values[step] = value

    @property
    def best(self) -> tuple[int, float] | None:
        """Step with the best value, the first of equal ones, and that value."""
        return max(self._values.items(), key=lambda item: (self._score(item[1]), -item[0]), default=None)

    @property
    def end_reason(self) -> str | None:
        """Reason to end the run, as a phrase for people; None while there is none."""
        criterion, best = self.criterion, self.best
        if best is None:
            return None
        step, value = best
        if criterion.goal is not None and self._score(value) >= self._score(criterion.goal):
            return f"{criterion.metric} has reached {value:g} at step {step}"
        if criterion.patience is not None and (count := self._values_since_gain()) >= criterion.patience:
            return f"{criterion.metric} has not become better than {value:g} {count} times in a row"
        return None

    def best_checkpoint(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        """Return the checkpoint with the best value; None if none has a value."""
        return next(iter(self._ranked(checkpoints)), None)

    def superfluous(self, checkpoints: Sequence[Checkpoint], *, last_step: int) -> list[Checkpoint]:
        """Return the checkpoints that are neither among the newest nor among the best.

        Args:
            checkpoints: checkpoints of the run.
            last_step: last reported step. A later checkpoint may yet be the best, and a resumed run may have to begin
                at an earlier one.
        """
        if self.keep_last is None:
            return []
        candidates = sorted(
            (checkpoint for checkpoint in checkpoints if checkpoint.step <= last_step),
            key=lambda checkpoint: checkpoint.step,
        )
        keep = {
            checkpoint.state
            for checkpoint in [*candidates[-self.keep_last :], *self._ranked(candidates)[: self.keep_best]]
        }
        return [checkpoint for checkpoint in candidates if checkpoint.state not in keep]

    def _ranked(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        with_value = [checkpoint for checkpoint in checkpoints if checkpoint.step in self._values]
        return sorted(with_value, key=lambda checkpoint: (-self._score(self._values[checkpoint.step]), checkpoint.step))

    def _values_since_gain(self) -> int:
        """Count the values, up to the last, that were no gain over the best before them."""
        count, best = 0, -math.inf
        for _, value in sorted(self._values.items()):
            score = self._score(value)
            if score > best + self.criterion.min_gain:
                count, best = 0, score
            else:
                count += 1
        return count

    def _score(self, value: float) -> float:
        return -value if self.criterion.is_lower_better else value
