"""The one schema of a run, for YAML, the command line and Python.

Invariant: every field is used by the run that it configures; an unknown or contradictory one is an error. The default
of a field carries its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Annotated, Literal, Self, cast

from pydantic import Field, model_validator

from rlkit._util.sections import Positive, Section, SectionTable
from rlkit.algorithms.estimator import Estimator
from rlkit.algorithms.estimators import GroupMean
from rlkit.algorithms.losses import ImportanceSampling
from rlkit.algorithms.schedules import SCHEDULES, Schedule, Sync
from rlkit.config.schema.envs import EnvConfig, EnvName, EvalEnvConfig
from rlkit.config.schema.metric_names import never_measured
from rlkit.config.schema.objective import (
    AdvantageConfig,
    KLPenaltyConfig,
    LengthPenaltyConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
)
from rlkit.config.schema.operation import BestConfig, ChatConfig, CheckpointConfig, PricesConfig, ServiceConfig
from rlkit.config.schema.sampling import RolloutsConfig, SamplingConfig
from rlkit.config.schema.track import TrackConfig, track_config
from rlkit.errors import ConfigError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_STEPS = 100


class BatchConfig(Section):
    """What one optimiser step is computed from."""

    groups: Positive = 16
    """Tasks in a step."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Rollouts of each task: the group's own mean is the baseline, and eight estimate it well enough."""
    substeps: Positive = 1
    """Optimiser steps that a step takes, each on an equal share of its groups. More than one is off-policy."""
    replace_uninformative: bool = False
    """Play another group for one whose rewards are all equal, so that every step learns from `groups` of them."""
    max_replaced: Positive | None = None
    """Groups that are replaced in one step; past that the step goes on with fewer. Null for four times `groups`."""
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    """Tokens of the longest sequence that is trained on; null trains on whatever the model sampled."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What becomes of a longer sequence: its beginning is trained on, it is left out, or the run ends."""
    normalize: Literal["none", "token", "sequence", "constant"] = "none"
    """What a token's advantage is divided by. `none`: nothing, so that the loss is the sum over tokens that the Tinker
    service computes; Adam does not mind its scale. `token`: the sampled tokens of the group. `sequence`: those of the
    episode, times the episodes of the group. `constant`: `normalize_tokens`, times the episodes of the group. All but
    `none` divide by the groups of an optimiser step too, so that its loss is a mean over groups."""
    normalize_tokens: Positive | None = None
    """With `normalize: constant`: tokens that an episode is taken to have; null for `sampling.max_tokens`."""
    clip_advantages: Annotated[float, Field(gt=0)] | None = None
    """Largest absolute advantage that is taken over from the estimator; null for any, since rewards of a known range
    bound it already."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.groups % self.substeps:
            raise ValueError(f"substeps: {self.groups} groups cannot be shared out equally to {self.substeps} substeps")
        if not self.replace_uninformative:
            self.refuse_unused("max_replaced", fix="set replace_uninformative to true")
        if self.max_tokens is None:
            self.refuse_unused("too_long", fix="set max_tokens")
        if self.normalize != "constant":
            self.refuse_unused("normalize_tokens", fix="set normalize to constant")
        return self


type ScheduleConfig = Annotated[Schedule, SectionTable(SCHEDULES, default="sync")]


class EvalConfig(Section):
    """Evaluation during training, on the weights as they are: before the first step, at times, and after the last."""

    every: Annotated[int, Field(ge=0)] = 10
    """Steps between evaluations; 0 evaluates only before and after."""
    envs: dict[EnvName, EvalEnvConfig] = Field(default_factory=dict[EnvName, EvalEnvConfig])
    """What is evaluated, by a name of your choice."""

    @model_validator(mode="after")
    def _evaluates_something(self) -> Self:
        if not self.envs and self.every and not self.is_default("every"):
            raise ValueError("`every` has no effect: name what is evaluated in eval.envs, or leave it out (eval=null)")
        return self


_INHERITED = (
    (None, "advantage"),
    ("batch", "group_size"),
    ("sampling", "temperature"),
    ("sampling", "max_tokens"),
    ("rollouts", "timeout_s"),
    ("rollouts", "max_retries"),
    ("rollouts", "min_valid"),
)
"""What an environment may say instead of the run: section and field."""

_OTHER_SIDE = {"min_valid": "max_failing_rollouts"}
"""The fields of an environment that say the same as another one of its own, and take its place."""

_BY_EVALUATIONS = (("sampling", "max_tokens"), ("rollouts", "timeout_s"), ("rollouts", "max_retries"))
"""Of these, what evaluations read too."""


def _default_steps(others: Mapping[str, object]) -> int | None:
    return DEFAULT_STEPS if others.get("epochs") is None else None


class Config(Section):
    """A whole run."""

    model: Annotated[str, Field(min_length=1)] = DEFAULT_MODEL
    """A model of the service, a name on the hub, or a directory. The default is small enough for a laptop."""
    name: EnvName | None = None
    """Name of the run and of its folder; null makes one from the environments and the time."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Everything random follows from it."""
    epochs: Positive | None = None
    """Times that each task is drawn, in the place of `steps`: these follow from the number of tasks. Null, since not
    every environment has a number of tasks."""
    steps: Annotated[
        Positive | None, Field(default_factory=_default_steps, json_schema_extra={"default": DEFAULT_STEPS})
    ]
    """Optimiser steps; null where `epochs` is set."""
    budget_usd: Annotated[float, Field(gt=0)] | None = None
    """US dollars, as rlkit counts them, after which the run saves and ends; null sets no limit."""
    budget_tokens: Positive | None = None
    """Tokens of all kinds, in prompts, samples and training, after which it does."""
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Hours after which it does, over all the times that it was resumed."""
    load_checkpoint: str | None = None
    """A `tinker://` path of training state to start from, instead of a fresh adapter."""
    envs: Annotated[dict[EnvName, EnvConfig], Field(min_length=1)]
    """What is trained on, by a name of your choice."""
    sampling: SamplingConfig = SamplingConfig()
    batch: BatchConfig = BatchConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    schedule: ScheduleConfig = Sync()
    """What is played when, and when gradients are computed."""
    advantage: AdvantageConfig = GroupMean()
    """How rewards become advantages. A name alone is short for the section with its defaults, and
    `package.module:name` or `file.py:name` for `custom`. The default, `group_mean`, changes least: no scale, no choice
    of what counts."""
    loss: LossConfig = ImportanceSampling()
    kl_penalty: KLPenaltyConfig = KLPenaltyConfig()
    length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    service: ServiceConfig = ServiceConfig()
    prices: PricesConfig = PricesConfig()
    best: BestConfig = BestConfig()
    chat: ChatConfig = ChatConfig()
    track: TrackConfig = Field(default_factory=track_config)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        path = self.load_checkpoint
        if path is not None and (not path.startswith("tinker://") or "/sampler_weights/" in path):
            raise ValueError(
                f"load_checkpoint: {self.load_checkpoint!r} is not a path of the form tinker://…/weights/…"
            )
        for field, named in (("envs", self.envs), ("eval.envs", self.eval.envs)):
            if "all" in named:
                raise ValueError(
                    f"{field}.all: the metrics of all environments together have this name; choose another, and say in "
                    "its `env` what it plays"
                )
        for name, env in self.envs.items():
            forcing, thinking = self.sampling.budget_forcing, env.max_tokens or self.sampling.max_tokens
            if forcing is not None and forcing.context_window_tokens <= thinking:
                raise ValueError(
                    f"sampling.budget_forcing.context_window_tokens: {forcing.context_window_tokens} leaves no room "
                    f"for an answer after the {thinking} tokens of envs.{name}; set it higher"
                )
            if (self.sampling.temperature if env.temperature is None else env.temperature) == 0:
                raise ValueError(
                    f"envs.{name}: at temperature 0 all rollouts of a task are the same, so there is nothing to learn "
                    "from; set temperature above 0"
                )
            size = env.group_size or self.batch.group_size
            self._has_valid_groups(name, env, size)
            self._estimates(f"envs.{name}", env.advantage or self.advantage, size)
        self._has_a_length()
        self._is_not_overridden()
        self._has_a_best()
        return self

    @property
    def step_count(self) -> int:
        """Optimiser steps of the run; with `epochs`, of the result of `rlkit.tasks.from_config.resolve_steps`."""
        assert self.steps is not None, "the number of tasks is not known yet"
        return self.steps

    def _has_a_length(self) -> None:
        if self.steps is None and self.epochs is None:
            raise ValueError("steps: is null, and so is `epochs`; set one of them, to say how long to train")
        if self.epochs is None:
            return
        if self.steps is not None:
            raise ValueError(
                f"epochs: `steps: {self.steps}` says already how long to train; set steps to null, or leave epochs out"
            )
        for name, env in self.envs.items():
            if env.curriculum is not None:
                raise ValueError(
                    f"envs.{name}.curriculum: says itself how often a task is drawn, and so does `epochs`; set `steps` "
                    "instead of epochs, or leave the curriculum out"
                )
            if env.weight != 1.0:
                raise ValueError(
                    f"envs.{name}.weight: has no effect with `epochs`, since each task of every environment is drawn "
                    "equally often; set `steps` instead of epochs, or leave the weight out"
                )

    def _has_valid_groups(self, name: str, env: EnvConfig, size: int) -> None:
        """Check that a group can have the valid episodes that it must have."""
        if (failing := env.max_failing_rollouts) is not None:
            field, most = f"envs.{name}.max_failing_rollouts", size - min(size, 2)
            if env.min_valid is not None:
                raise ValueError(f"{field}: min_valid says the same from the other side; leave one of the two out")
            if failing > most:
                raise ValueError(
                    f"{field}: leaves {max(0, size - failing)} of {size} rollouts, and a group needs {min(size, 2)} at "
                    f"least; set it to {most} or less"
                )
            return
        least = env.min_valid or self.rollouts.min_valid
        if least > size and (env.min_valid is not None or least != RolloutsConfig.model_fields["min_valid"].default):
            field = "rollouts.min_valid" if env.min_valid is None else f"envs.{name}.min_valid"
            raise ValueError(
                f"{field}: {least} episodes are more than a group of envs.{name} has; set it to {size} or less"
            )

    def _is_not_overridden(self) -> None:
        """Whether what the run says is of use to one of its environments at least."""
        for section, name in _INHERITED:
            holder = self if section is None else cast("Section", getattr(self, section))
            users = [*self.envs.values(), *(self.eval.envs.values() if (section, name) in _BY_EVALUATIONS else ())]
            other = _OTHER_SIDE.get(name, name)
            has_own = [any(getattr(user, own, None) is not None for own in (name, other)) for user in users]
            if all(has_own) and not holder.is_default(name):
                field = name if section is None else f"{section}.{name}"
                which = "" if other == name else f" {name} or {other}"
                raise ValueError(f"{field}: has no effect, since every environment has its own{which}")
        if len(self.envs) == 1 and (only := next(iter(self.envs.items())))[1].weight != 1.0:
            raise ValueError(f"envs.{only[0]}.weight: has no effect, since there is no other environment")
        if not self.schedule.steps_ahead:
            for name, env in self.envs.items():
                if not env.newest_weights:
                    raise ValueError(
                        f"envs.{name}.newest_weights: has no effect, since weights change only between the rollouts of "
                        f"the schedule {self.schedule.name}; set schedule.mode to async"
                    )

    @property
    def best_metric(self) -> str | None:
        """What weights are compared by, if they are."""
        return self.best.metric or ("eval/all/reward/mean" if self.eval.envs else None)

    def _has_a_best(self) -> None:
        if (self.best.metric or "").startswith("eval/all/") and not self.eval.envs:
            raise ValueError("best.metric: nothing is evaluated; name something in eval.envs")
        if not self.checkpoint.is_default("keep_best") and not self.best_metric:
            raise ValueError("checkpoint.keep_best: has no effect, since nothing says which are best; set best.metric")
        for name in sorted(self.best.model_fields_set):
            if self.best_metric is None and not self.best.is_default(name):
                raise ValueError(f"best.{name} has no effect: name what is evaluated in eval.envs, or set best.metric")
        if self.best.metric is None:
            return
        why = never_measured(self.best.metric, envs=self.envs, evals=self.eval.envs, needs=self._absent_metrics())
        if why is not None:
            raise ValueError(f"best.metric: {why}")

    def _absent_metrics(self) -> dict[str, str]:
        """Return the metrics, or groups of metrics, that no step has with these settings, and what to set for them."""
        needs = dict[str, str]()
        if not self.kl_penalty.coefficient:
            needs["kl_reference"] = "set kl_penalty.coefficient"
        if not self.length_penalty.coefficient:
            needs["batch/length_penalty"] = "set length_penalty.coefficient"
        if self.batch.clip_advantages is None:
            needs["batch/clipped"] = "set batch.clip_advantages"
        if not self.loss.clips_tokens:
            needs["optim/ratio/clipped"] = f"the loss {self.loss.name} clips nothing"
        return needs

    @model_validator(mode="after")
    def _has_an_objective(self) -> Self:
        if self.loss.normalize_problem and self.batch.normalize != "none":
            raise ValueError(f"batch.normalize: {self.loss.normalize_problem}")
        if self.steps is not None:
            self.optimizer.check_steps(self.steps)
        if self.length_penalty.coefficient:
            for name in self.envs:
                if self.length_penalty.from_tokens >= self.full_penalty_tokens(name):
                    raise ValueError(
                        f"length_penalty.from_tokens: {self.length_penalty.from_tokens} is not below the "
                        f"{self.full_penalty_tokens(name)} tokens at which the penalty of envs.{name} is full"
                    )
        return self

    def full_penalty_tokens(self, env: str) -> int:
        """Sampled tokens of an episode of this environment at which the length penalty is full."""
        return self.length_penalty.to_tokens or self.envs[env].max_tokens or self.sampling.max_tokens

    def refuse_turn_settings(self, single: Set[str]) -> None:
        """Raise ConfigError for a setting of later turns, such as a discount, that no environment has use for.

        Args:
            single: environments whose tasks are known to have a single turn.
        """
        single = single | {name for name, env in self.envs.items() if env.max_turns == 1}
        inherit = {name for name, env in self.envs.items() if env.advantage is None}
        own = [(f"envs.{name}.advantage", env.advantage, {name}) for name, env in self.envs.items() if env.advantage]
        for field, section, users in [("advantage", self.advantage, inherit), *own]:
            for setting in section.turn_settings:
                if users <= single and not section.is_default(setting):
                    raise ConfigError(
                        f"{field}.{setting}: has no effect, since each task of {', '.join(sorted(users))} has a single "
                        "turn; leave it out"
                    )

    def _estimates(self, field: str, advantage: Estimator, size: int) -> None:
        """Whether an environment's groups have what its estimator needs."""
        if (problem := advantage.size_problem(size)) is not None:
            raise ValueError(f"{field}: {problem}")
        if (problem := advantage.stream_problem) is not None and self.schedule.is_streaming:
            own = "" if self.envs[field.removeprefix("envs.")].advantage is None else f"{field}."
            raise ValueError(f"{own}advantage: {problem}")
