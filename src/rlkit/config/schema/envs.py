"""The sections of an environment, in training and in evaluation, and of its curriculum.

Invariant: a curriculum has only the settings that it uses. Settings of later turns are rejected if all tasks have a
single turn.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from rlkit._util.sections import Positive, Probability, Section
from rlkit.config.schema.objective import AdvantageConfig
from rlkit.config.schema.sampling import WorkersConfig
from rlkit.config.schema.teacher import TeacherConfig
from rlkit.errors import ConfigError

type EnvName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$")]
type RewardUse = Literal["train", "none"]
type Share = Annotated[float, Field(ge=0, le=1)]


class FilterCurriculum(Section):
    """Skip tasks that are almost never or almost always solved, and retry them periodically."""

    name: Literal["filter"]
    """Name of the curriculum."""
    min_solve_rate: Share = 0.1
    """Solve rate below which a task is skipped; at 0.1, 43 % of the groups of 8 have only failures."""
    max_solve_rate: Share = 0.9
    """Solve rate above which a task is skipped; as far from 1 as `min_solve_rate` is from 0."""
    min_groups: Positive = 2
    """Minimum groups of a task before it can be skipped, because a single group may be unlucky."""
    recheck_epochs: Annotated[int, Field(ge=2)] = 5
    """Epochs between retries of a skipped task. A retry can bring the task back. The retries of different tasks are
    spread over the epochs."""
    solved_reward: float = 1.0
    """Minimum reward of a solved episode; 1 is the full reward of most graders."""
    newest_weight: Probability = 0.5
    """Weight of the newest group in a task's solve rate. 0.5 follows the changes of a policy between two epochs;
    1 uses only the last group."""

    def _check_section(self) -> None:
        if (self.min_solve_rate, self.max_solve_rate) == (0, 1):
            problem = "every solve rate is between 0 and 1, so no task would be skipped"
            raise ValueError(f"min_solve_rate and max_solve_rate: {problem}")
        if self.min_solve_rate > self.max_solve_rate:
            problem = f"{self.min_solve_rate:g} is above max_solve_rate, {self.max_solve_rate:g}"
            raise ValueError(f"min_solve_rate: {problem}, so every task would be skipped")


class TargetCurriculum(Section):
    """Draw tasks more often if their solve rate is close to a target."""

    name: Literal["target"]
    """Name of the curriculum."""
    target: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Solve rate of the tasks that are drawn most often; at 0.5, the rewards of a group differ most."""
    sharpness: Annotated[float, Field(gt=0)] = 2.0
    """Decay of the weight away from the target. With 2 and a target of 0.5, a weight is the learnability, 4p(1 − p)."""
    explore_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of draws that are uniform over all tasks, so that tasks with solve rate 0 or 1 are retried."""
    solved_reward: float = 1.0
    """Minimum reward of a solved episode; 1 is the full reward of most graders."""
    newest_weight: Probability = 0.5
    """Weight of the newest group in a task's solve rate, as in `filter`."""


type CurriculumConfig = Annotated[FilterCurriculum | TargetCurriculum, Field(discriminator="name")]


class EnvConfig(Section):
    """Environment of a run. Null fields are inherited from the run."""

    env: str | None = None
    """Built-in name (such as `arithmetic`), `package.module:name` or `file.py:name`; null for the key of this
    section."""
    args: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Arguments of the environment."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the groups, relative to the other environments."""
    group_size: Positive | None = None
    """Rollouts of one task; null for `batch.group_size`."""
    max_tokens: Positive | None = None
    """Maximum tokens of a completion; null for `sampling.max_tokens`."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Temperature of sampling; null for `sampling.temperature`."""
    max_turns: Positive | None = None
    """Maximum turns of a rollout; null for the environment's own limit."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Time limit of a rollout in seconds; null for `rollouts.timeout_s`."""
    max_retries: Annotated[int, Field(ge=0)] | None = None
    """Maximum retries of failed episodes in a group; null for `rollouts.max_retries`."""
    min_valid: Positive | None = None
    """Minimum episodes with a reward in a group; null for `rollouts.min_valid`."""
    max_failing_rollouts: Annotated[int, Field(ge=0)] | None = None
    """Maximum rollouts of a group that may fail after all retries; if more fail, the group is dropped. Alternative to
    `min_valid`."""
    workers: WorkersConfig | None = None
    """Processes that run the environment's code; null for `rollouts.workers`."""
    newest_weights: bool = True
    """Switch a running rollout to newer weights at its next turn; if false, it keeps its initial weights."""
    advantage: AdvantageConfig | None = None
    """Estimator of advantages for this environment; null for the run's `advantage`."""
    reward: RewardUse | None = None
    """`train` or `none`; null for the run's `reward`."""
    teacher: TeacherConfig | None = None
    """Teacher of this environment; null for the run's `teacher`, unless `teachers` is set."""
    teachers: dict[EnvName, TeacherConfig] | None = None
    """Teachers of this environment by name; null for the run's `teachers`, unless `teacher` is set, and {} for none."""
    curriculum: CurriculumConfig | None = None
    """Choice of tasks by solve rate. Null plays every task once per epoch. It is the default, because solve rates are
    unknown before the run."""


class EvalEnvConfig(Section):
    """Environment for evaluation, never for training."""

    env: str | None = None
    """As in `envs`; null for the key of this section."""
    args: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Arguments of the environment. They should select other tasks than the training tasks."""
    tasks: Positive = 100
    """Number of tasks: the first tasks in the environment's order."""
    attempts: Positive = 1
    """Rollouts per task."""
    max_tokens: Positive | None = None
    """Maximum tokens of a completion; null for `sampling.max_tokens`."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature; 0 is greedy, so two evaluations differ only by the weights."""
    max_turns: Positive | None = None
    """Maximum turns of a rollout; null for the environment's own limit."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Time limit of a rollout in seconds; null for `rollouts.timeout_s`."""


class EvalConfig(Section):
    """Evaluation of the current weights before the first step, every `every` steps, and after the last step."""

    every: Annotated[int, Field(ge=0)] = 10
    """Steps between evaluations; 0 evaluates only before the first step and after the last."""
    envs: dict[EnvName, EvalEnvConfig] = Field(default_factory=dict[EnvName, EvalEnvConfig])
    """Environments for evaluation, by a name of your choice."""

    def _check_section(self) -> None:
        if not self.envs and self.every and not self.is_default("every"):
            raise ValueError("`every` has no effect: add environments to eval.envs, or leave out `every` (eval=null)")


def refuse_turn_limit(spec: EnvConfig | EvalEnvConfig, *, field: str) -> None:
    """Raise ConfigError if `max_turns` is set for an environment whose tasks have a single turn."""
    if spec.max_turns is not None:
        raise ConfigError(f"{field}.max_turns: has no effect, because each task has a single turn; leave out max_turns")
