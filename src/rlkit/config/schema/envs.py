"""The sections of one environment: in training, in evaluation, and its curriculum.

Invariant: a curriculum has only the settings that it uses. A setting of later turns is refused once it is known that
the tasks have a single turn.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rlkit._util.sections import Positive, Probability, Section
from rlkit.config.schema.objective import AdvantageConfig
from rlkit.errors import ConfigError

type EnvName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$")]
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


class EnvConfig(Section):
    """One environment of a run. What is null is inherited from the run."""

    env: str | None = None
    """A built-in name (`arithmetic`), `package.module:name` or `file.py:name`; null takes the key that holds it."""
    args: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Arguments of the environment."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share of the groups, relative to the other environments."""
    group_size: Positive | None = None
    """Rollouts of one task; null for `batch.group_size`."""
    max_tokens: Positive | None = None
    """Tokens that one completion may have; null for `sampling.max_tokens`."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Null for `sampling.temperature`."""
    max_turns: Positive | None = None
    """Completions that one rollout may ask for; null leaves it to the environment."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds that one rollout may take; null for `rollouts.timeout_s`."""
    max_retries: Annotated[int, Field(ge=0)] | None = None
    """Failed episodes of a group that are played again; null for `rollouts.max_retries`."""
    min_valid: Positive | None = None
    """Episodes with a reward that a group must have; null for `rollouts.min_valid`."""
    max_failing_rollouts: Annotated[int, Field(ge=0)] | None = None
    """Rollouts of a group that may fail for good; with one more it is dropped. Instead of `min_valid`."""
    newest_weights: bool = True
    """A rollout moves to newer weights at its next turn; false keeps it on those that it began with."""
    advantage: AdvantageConfig | None = None
    """As `advantage` of the run, for this environment; null for the run's."""
    curriculum: CurriculumConfig | None = None
    """Which of its tasks are played, by how often each was solved; null plays all of them, once an epoch, since what a
    task can teach is not known before the run."""


class EvalEnvConfig(Section):
    """One environment that is evaluated, never trained on."""

    env: str | None = None
    """As in `envs`; null takes the key that it stands under."""
    args: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Arguments of the environment; choose them so that its tasks are not those of training."""
    tasks: Positive = 100
    """Tasks that are played, the first of the environment's own order."""
    attempts: Positive = 1
    """Rollouts of each task."""
    max_tokens: Positive | None = None
    """Null for `sampling.max_tokens`."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Greedy, so that two evaluations differ only by the weights."""
    max_turns: Positive | None = None
    """Completions that one rollout may ask for; null leaves it to the environment."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds that one rollout may take; null for `rollouts.timeout_s`."""


def refuse_turn_limit(spec: EnvConfig | EvalEnvConfig, *, field: str) -> None:
    """Raise ConfigError for a limit of turns of an environment whose tasks have a single turn."""
    if spec.max_turns is not None:
        raise ConfigError(f"{field}.max_turns: has no effect, since each of its tasks has a single turn; leave it out")
