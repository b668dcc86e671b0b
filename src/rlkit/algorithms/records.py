"""Groups and steps as training hands them on: the played group, its place in a step, and the result of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlkit.algorithms.datums import Prepared
from rlkit.algorithms.losses import Loss
from rlkit.types import Datum, Floats


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """A group as it comes out of play.

    Args:
        prepared: the group, and what it teaches.
        usable: enough of its episodes have a reward.
    """

    prepared: Prepared
    usable: bool

    @property
    def teaches(self) -> bool:
        """True where the group is usable and its episodes differ, so that there is something to learn."""
        return self.usable and self.prepared.teaches


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """A group that a step got; one that does not count was replaced by another."""

    played: Played
    counts: bool


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Result of a step.

    Args:
        data: that it trained on.
        logprobs: for each datum, [N] float32, the trainer's log-probabilities before the optimiser step.
        metrics: what the service reported; of several requests, sums of what is named `:sum`, and means of the rest.
        loss: of every sequence.
        learning_rate: of the step.
    """

    data: Sequence[Datum]
    logprobs: Sequence[Floats]
    metrics: Mapping[str, float]
    loss: Loss
    learning_rate: float
