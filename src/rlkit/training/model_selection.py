"""Model selection: the best weights of a run, the checkpoints to keep, and early stopping.

Invariant: every decision depends only on the reported metrics, so a resumed run makes the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlkit.config.schema.operation import BestConfig
from rlkit.types import Checkpoint


@dataclass(slots=True, eq=False)
class ModelSelection:
    """Comparison of the steps of a run."""

    criterion: BestConfig  # comparison of two steps; without a metric, nothing is compared
    keep_last: int | None = None  # number of newest checkpoints to keep; None for all
    keep_best: int = 0  # number of checkpoints with the best values to keep as well
    _values: dict[int, float] = field(default_factory=dict[int, float])

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step; the criterion's metric may be missing."""
        value = None if self.criterion.metric is None else metrics.get(self.criterion.metric)
        if value is not None and math.isfinite(value):
            self._values[step] = value

    @property
    def best(self) -> tuple[int, float] | None:
        """Step with the best value, and the value; the first step if several are equal."""
        return max(self._values.items(), key=lambda item: (self._score(item[1]), -item[0]), default=None)

    @property
    def end_reason(self) -> str | None:
        """Reason to end the run, as a phrase for people; None to continue."""
        if (best := self.best) is None:
            return None
        criterion, (step, value) = self.criterion, best
        if criterion.goal is not None and self._score(value) >= self._score(criterion.goal):
            return f"{criterion.metric} has reached {value:g} at step {step}"
        if criterion.patience is not None and (count := self._values_since_gain()) >= criterion.patience:
            return f"{criterion.metric} has not become better than {value:g} {count} times in a row"
        return None

    def best_checkpoint(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        """Return the checkpoint with the best value, or None if no checkpoint has a value."""
        return next(iter(self._ranked(checkpoints)), None)

    def superfluous(self, checkpoints: Sequence[Checkpoint], *, last_step: int) -> list[Checkpoint]:
        """Return the checkpoints that are neither among the newest nor among the best.

        Checkpoints after the last reported step are ignored: they may become the best, and a resumed run may have to
        begin before them.
        """
        if self.keep_last is None:
            return []
        candidates = [saved for saved in checkpoints if saved.step <= last_step]
        candidates.sort(key=lambda saved: saved.step)
        selected = [*candidates[-self.keep_last :], *self._ranked(candidates)[: self.keep_best]]
        states = {saved.state for saved in selected}
        return [saved for saved in candidates if saved.state not in states]

    def _ranked(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        with_value = [saved for saved in checkpoints if saved.step in self._values]
        return sorted(with_value, key=lambda saved: (-self._score(self._values[saved.step]), saved.step))

    def _values_since_gain(self) -> int:
        """Return the number of values after the last gain."""
        count, best = 0, -math.inf
        for _, value in sorted(self._values.items()):
            if (score := self._score(value)) > best + self.criterion.min_gain:
                count, best = 0, score
            else:
                count += 1
        return count

    def _score(self, value: float) -> float:
        return -value if self.criterion.lower_is_better else value
