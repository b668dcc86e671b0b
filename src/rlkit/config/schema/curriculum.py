"""The section that chooses how the tasks of an environment are picked by how often they are solved.

Invariant: a curriculum has only the settings that it uses.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlkit._util.sections import Positive, Probability, Section

type Share = Annotated[float, Field(ge=0, le=1)]


class FilterCurriculum(Section):
    """Tasks that are hardly ever or nearly always solved are left out, and looked at again now and then."""

    name: Literal["filter"]
    """The curriculum."""
    low: Share = 0.1
    """A task whose solve rate is below this is left out; at a tenth, a group of 8 is all failures four times in ten."""
    high: Share = 0.9
    """A task whose solve rate is above this is left out; as far from 1 as `low` is from 0."""
    min_groups: Positive = 2
    """Groups of a task that are seen before it may be left out: one alone may be bad luck."""
    recheck: Annotated[int, Field(ge=2)] = 5
    """Epochs in one of which a task that is left out is played all the same, so that it can come back; each task has a
    turn of its own, so that few are looked at again at once."""
    solved: float = 1.0
    """Reward from which on an episode counts as solved; 1 is full marks with most graders."""
    newest: Probability = 0.5
    """Weight of the newest group in a task's solve rate. A half forgets as fast as a policy changes between two epochs;
    1 knows only the last group."""

    @model_validator(mode="after")
    def _leaves_something_out(self) -> Self:
        if (self.low, self.high) == (0, 1):
            raise ValueError("low and high: every solve rate is between 0 and 1, so that nothing would be left out")
        if self.low > self.high:
            raise ValueError(f"low: {self.low:g} is above high, {self.high:g}, so that every task would be left out")
        return self


class TargetCurriculum(Section):
    """Tasks are drawn the more often, the nearer their solve rate is to a target."""

    name: Literal["target"]
    """The curriculum."""
    target: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Solve rate of the tasks that are drawn most; at a half, the rewards of a group differ most."""
    sharpness: Annotated[float, Field(gt=0)] = 2.0
    """How fast the weight falls away from the target; 2, with a target of a half, is the learnability p(1 − p)."""
    explore: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the draws that take any task alike, so that one whose solve rate was 0 or 1 can come back."""
    solved: float = 1.0
    """Reward from which on an episode counts as solved; 1 is full marks with most graders."""
    newest: Probability = 0.5
    """Weight of the newest group in a task's solve rate, as in `filter`."""


type CurriculumConfig = Annotated[FilterCurriculum | TargetCurriculum, Field(discriminator="name")]
