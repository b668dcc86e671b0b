"""Which weights of a run are its best, which checkpoints are kept, and when more training is of no use.

Invariant: all of it follows from what was reported of each step, so that a run that goes on decides as it would have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlkit.types import Checkpoint


@dataclass(frozen=True, slots=True)
class Aim:
    """What a run is to do well in.

    Args:
        metric: its name; None for nothing in particular.
        lower: less of it is better.
        patience: values in a row that are no better than the best before, after which the run ends; None for never.
        min_gain: by how much a value must be better to count.
        goal: the value at which the run ends; None for never.
    """

    metric: str | None = None
    lower: bool = False
    patience: int | None = None
    min_gain: float = 0.0
    goal: float | None = None


@dataclass(slots=True, eq=False)
class Selection:
    """Compares steps.

    Args:
        aim: by what.
        keep_last: newest checkpoints to keep; None for all.
        keep_best: checkpoints with the best values to keep besides.
    """

    aim: Aim
    keep_last: int | None = None
    keep_best: int = 0
    _values: dict[int, float] = field(default_factory=dict[int, float])

    def tell(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step was reported; whether its metrics hold the one that counts or not."""
        value = None if self.aim.metric is None else metrics.get(self.aim.metric)
        if value is not None and math.isfinite(value):
            self._values[step] = value

    @property
    def best(self) -> tuple[int, float] | None:
        """The step with the best value, the first of equal ones, and that value."""
        return max(self._values.items(), key=lambda one: (self._good(one[1]), -one[0]), default=None)

    @property
    def enough(self) -> str | None:
        """Why more training is of no use, as a phrase for people; None while it may be."""
        aim, best = self.aim, self.best
        if best is None:
            return None
        step, value = best
        if aim.goal is not None and self._good(value) >= self._good(aim.goal):
            return f"{aim.metric} has reached {value:g} at step {step}"
        if aim.patience is not None and (since := self._since_gain()) >= aim.patience:
            return f"{aim.metric} has not become better than {value:g} {since} times in a row"
        return None

    def best_of(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        """The checkpoint with the best value; None where none has one."""
        return next(iter(self._ranked(checkpoints)), None)

    def superfluous(self, checkpoints: Sequence[Checkpoint], *, reported: int) -> list[Checkpoint]:
        """Those that are neither among the newest nor among the best.

        Args:
            checkpoints: that there are.
            reported: the last step of which everything is known. A later checkpoint may yet be the best, and a run that
                goes on may have to begin at an earlier one.
        """
        if self.keep_last is None:
            return []
        known = sorted((saved for saved in checkpoints if saved.step <= reported), key=lambda saved: saved.step)
        kept = {saved.state for saved in [*known[-self.keep_last :], *self._ranked(known)[: self.keep_best]]}
        return [saved for saved in known if saved.state not in kept]

    def _ranked(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        known = [saved for saved in checkpoints if saved.step in self._values]
        return sorted(known, key=lambda saved: (-self._good(self._values[saved.step]), saved.step))

    def _since_gain(self) -> int:
        """Values in a row, up to the last, that were no better than the best before them."""
        since, best = 0, -math.inf
        for _, value in sorted(self._values.items()):
            good = self._good(value)
            if good > best + self.aim.min_gain:
                since, best = 0, good
            else:
                since += 1
        return since

    def _good(self, value: float) -> float:
        return -value if self.aim.lower else value
