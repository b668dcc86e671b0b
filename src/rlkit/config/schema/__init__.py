"""Schema of a run's configuration, for YAML, the command line and Python.

Invariant: a run uses every field of its configuration; an unknown or contradictory field is an error. The docstring of
a field gives the reason for its default.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import product
from typing import Annotated, cast

from pydantic import Field

from rlkit._util.model_names import DEFAULT_MODEL
from rlkit._util.sections import Positive, Section, validate_fields
from rlkit.algorithms.estimator import Estimator
from rlkit.algorithms.estimators import GroupMean
from rlkit.algorithms.losses import ClippedLoss, CrossEntropy, Distillation, ImportanceSampling
from rlkit.algorithms.schedules import Sync
from rlkit.config.schema.batch import BatchConfig, ScheduleConfig
from rlkit.config.schema.envs import EnvConfig, EnvName, EvalConfig, RewardUse, refuse_turn_limit
from rlkit.config.schema.metric_names import REWARD_METRICS, metric_problem
from rlkit.config.schema.objective import AdvantageConfig, LengthPenaltyConfig, LoraConfig, LossConfig, OptimizerConfig
from rlkit.config.schema.operation import BestConfig, ChatConfig, CheckpointConfig, PricesConfig, ServiceConfig
from rlkit.config.schema.sampling import RolloutsConfig, SamplingConfig
from rlkit.config.schema.supervised import DEMONSTRATIONS, SourceConfig, WarmStartConfig
from rlkit.config.schema.teacher import KLPenaltyConfig, TeacherConfig, check_windows
from rlkit.config.schema.track import TrackConfig, track_config
from rlkit.errors import ConfigError

DEFAULT_STEPS = 100


_REINFORCEMENT = ("reward", "teacher", "teachers")
"""Fields of the run and of an environment that need rollouts."""

_INHERITED = {
    "": ("advantage", *_REINFORCEMENT),
    "batch": ("group_size",),
    "sampling": ("temperature", "max_tokens"),
    "rollouts": ("timeout_s", "max_retries", "min_valid"),
}
"""Fields of the run that an environment may override, by section."""

_ALTERNATIVES = {"min_valid": "max_failing_rollouts", "teacher": "teachers", "teachers": "teacher"}
"""Alternative fields of an environment, which replace the field in the key, too."""

_EVALUATION_FIELDS = ("max_tokens", "timeout_s", "max_retries")  # fields of `_INHERITED` that evaluations use, too


def _default_steps(others: Mapping[str, object]) -> int | None:
    return DEFAULT_STEPS if others.get("epochs") is None else None


class Config(Section):
    """The configuration of a run."""

    model: Annotated[str, Field(min_length=1)] = DEFAULT_MODEL
    """Model of the service, name on the Hugging Face hub, or directory. The default is small enough for a laptop."""
    name: EnvName | None = None
    """Name of the run and of its folder; null derives one from the environments and the time."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of all randomness of the run."""
    epochs: Positive | None = None
    """Number of times that each task is drawn; an alternative to `steps`. Null, because some environments have
    infinitely many tasks."""
    steps: Annotated[
        Positive | None, Field(default_factory=_default_steps, json_schema_extra={"default": DEFAULT_STEPS})
    ]
    """Training steps; null if `epochs` is set."""
    budget_usd: Annotated[float, Field(gt=0)] | None = None
    """Budget in US dollars, by rlkit's own count. When the budget is used up, the run saves and ends. Null for no
    limit."""
    budget_tokens: Positive | None = None
    """Budget in tokens: prompt, sampled and trained tokens together; null for no limit."""
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Budget in hours of working time, over all resumptions; null for no limit."""
    load_checkpoint: str | None = None
    """`tinker://…/weights/…` path of a checkpoint to start from; null for a fresh adapter."""
    envs: dict[EnvName, EnvConfig] = Field(default_factory=dict[EnvName, EnvConfig])
    """Environments for training, by a name of your choice."""
    source: SourceConfig | None = None
    """Conversations to train on; null for none. Their metrics have the environment name `source`."""
    warm_start: WarmStartConfig | None = None
    """Supervised steps before reinforcement; null for none. Their metrics have the environment name `warm_start`."""
    sampling: SamplingConfig = SamplingConfig()
    batch: BatchConfig = BatchConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    schedule: ScheduleConfig = Sync()
    """Order of rollouts and gradients."""
    advantage: AdvantageConfig = GroupMean()
    """Estimator of advantages from rewards. A bare name uses the estimator's default settings; `package.module:name` or
    `file.py:name` is short for `custom`. The default `group_mean` is the simplest: it only subtracts the mean."""
    loss: LossConfig = ImportanceSampling()
    reward: RewardUse = "train"
    """`train` trains on the advantages of rewards. `none` trains on the teacher only. Rewards are measured anyway."""
    teacher: TeacherConfig | None = None
    """Model to imitate, in addition to the rewards; null for none."""
    teachers: dict[EnvName, TeacherConfig] | None = None
    """Several models to imitate at once, by names of your choice; null for none."""
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

    def _check_section(self) -> None:
        self._add_sources()
        self._check_consistency()
        self._check_objective()

    def _add_sources(self) -> None:
        """Add the environments of `source` and `warm_start`, and choose the loss of a run without rollouts."""
        for name, section in (("source", self.source), ("warm_start", self.warm_start)):
            if (spec := self.envs.pop(name, None)) is not None and spec.env != DEMONSTRATIONS:
                use = f"for the conversations of `{name}`"
                raise ValueError(f"envs.{name}: this name is reserved {use}; choose another")
            if section is not None:
                self.envs[name] = section.as_env()
        for name in self.envs.keys() - self.reinforced_envs.keys():
            spec = self.envs[name]
            if spec.args:
                validate_fields(SourceConfig, spec.args, place=f"envs.{name}.args")
            self.envs[name] = spec.model_copy(update={"group_size": 1})
            for key in ("group_size", "max_tokens", "temperature", "max_turns", "advantage", *_REINFORCEMENT):
                if getattr(spec, key) not in (None, 1 if key == "group_size" else None):
                    raise ValueError(f"envs.{name}.{key}: has no effect, because a conversation is one given episode")
        if not self.envs.keys() - {"warm_start"}:
            fix = "; for supervised steps alone, rename warm_start to source" if self.warm_start else ""
            raise ValueError(f"envs: name the environments to train on, for instance envs: {{arithmetic: {{}}}}{fix}")
        names, is_supervised = ", ".join(self.reinforced_envs), isinstance(self.loss, CrossEntropy)
        if names and is_supervised:
            use = "for the conversations of source and warm_start"
            raise ValueError(f"loss: cross_entropy is {use}, and not for {names}")
        if not names and not is_supervised:
            if "loss" in self.model_fields_set:
                raise ValueError(f"loss: {self.loss.name} needs rollouts, and there are none; set it to cross_entropy")
            object.__setattr__(self, "loss", CrossEntropy())  # sections are frozen

    def _check_consistency(self) -> None:
        path = self.load_checkpoint
        if path is not None and (not path.startswith("tinker://") or "/sampler_weights/" in path):
            raise ValueError(f"load_checkpoint: {path!r} is not a path of the form tinker://…/weights/…")
        for field, envs in (("envs", self.envs), ("eval.envs", self.eval.envs)):
            if "all" in envs:
                problem = "this name is reserved for the metrics of all environments together"
                raise ValueError(f"{field}.all: {problem}; choose another name, and set its `env`")
        for name, env in self.eval.envs.items():
            if (env.env or name) == DEMONSTRATIONS:
                raise ValueError(f"eval.envs.{name}: the model does not play given conversations; leave it out")
        for name, env in self.reinforced_envs.items():
            forcing, thinking_tokens = self.sampling.budget_forcing, env.max_tokens or self.sampling.max_tokens
            if forcing is not None and forcing.context_window_tokens <= thinking_tokens:
                field, tokens = "sampling.budget_forcing.context_window_tokens", forcing.context_window_tokens
                problem = f"{tokens} leaves no room for an answer after the {thinking_tokens} tokens of envs.{name}"
                raise ValueError(f"{field}: {problem}; set it higher")
            if (self.sampling.temperature if env.temperature is None else env.temperature) == 0:
                problem = "at temperature 0 all rollouts of a task are equal, so nothing can be learned"
                raise ValueError(f"envs.{name}: {problem}; set temperature above 0")
            size = env.group_size or self.batch.group_size
            self._check_valid_episodes(name, env, size)
            if self.trains_on_rewards(name):
                self._check_estimator(f"envs.{name}", env.advantage or self.advantage, size)
            self.check_teachers(name, env)
        names = ("advantage", "length_penalty", *(() if self.reinforced_envs else (*_REINFORCEMENT, "kl_penalty")))
        unused = [name for name in names if not self.is_default(name)]
        batch = () if self.reinforced_envs else ("clip_advantages", "replace_uninformative")
        unused += [f"batch.{name}" for name in batch if not self.batch.is_default(name)]
        if unused and not any(map(self.trains_on_rewards, self.envs)):
            reason = "reward is none; leave out one of them" if self.reinforced_envs else "there are no rollouts"
            raise ValueError(f"{unused[0]}: has no effect, because {reason}")
        self._check_length()
        self._check_overrides()
        self._check_best()

    @property
    def step_count(self) -> int:
        """Steps of the run and its warm start. With `epochs`, `rlkit.tasks.from_config.resolve_steps` must have run."""
        assert self.steps is not None, "the number of tasks is unknown"
        return self.steps + self.warm_start_steps

    @property
    def warm_start_steps(self) -> int:
        """Supervised steps before reinforcement."""
        return self.warm_start.steps if self.warm_start else 0

    @property
    def reinforced_envs(self) -> dict[str, EnvConfig]:
        """Environments that rollouts play; the others hold conversations, and are supervised."""
        return {name: spec for name, spec in self.envs.items() if (spec.env or name) != DEMONSTRATIONS}

    def find_field(self, env: str) -> str:
        """Return the field that describes an environment."""
        return env if self.envs[env].env == DEMONSTRATIONS and env in ("source", "warm_start") else f"envs.{env}"

    def find_teachers(self, env: str) -> dict[str, TeacherConfig]:
        """Return the teachers of an environment by their fields: its own, or the run's; none for conversations."""
        if (spec := self.envs.get(env)) is not None and env not in self.reinforced_envs:
            return {}
        has_own = spec is not None and (spec.teacher is not None or spec.teachers is not None)
        owner, place = (spec, f"envs.{env}.") if spec is not None and has_own else (self, "")
        named = {f"{place}teachers.{name}": teacher for name, teacher in (owner.teachers or {}).items()}
        return named if owner.teacher is None else {f"{place}teacher": owner.teacher, **named}

    def trains_on_rewards(self, env: str) -> bool:
        """Return whether the rewards of an environment give advantages."""
        return env in self.reinforced_envs and (self.envs[env].reward or self.reward) == "train"

    def check_teachers(self, name: str, env: EnvConfig) -> None:
        """Raise ValueError unless an environment has something to learn from in each step, and all of it counts."""
        teachers, first = self.find_teachers(name), self.warm_start_steps + 1
        is_constant = check_windows(teachers, first=first, last=self.step_count if self.steps is not None else 0)
        if self.trains_on_rewards(name):
            return
        if not teachers:
            raise ValueError(f"envs.{name}: reward is none and there is no teacher, so nothing trains; set teacher")
        field, is_fresh = next(iter(teachers)), not (self.load_checkpoint or self.warm_start)
        if not is_constant:
            fix = "a teacher must count in each step; change or omit first_step and last_step"
            raise ValueError(f"{field}: reward is none, so {fix}")
        if is_fresh and all(teacher.is_model(self.model) for teacher in teachers.values()):
            problem = "it is the model that the run starts from, so nothing trains; set model, checkpoint or prompt"
            raise ValueError(f"{field}: {problem}")
        if env.advantage is not None:
            raise ValueError(f"envs.{name}.advantage: has no effect, because reward is none; leave out one of them")

    def _check_length(self) -> None:
        if self.steps is None and self.epochs is None:
            raise ValueError("steps: both `steps` and `epochs` are null; set one of them")
        if self.epochs is None:
            return
        if self.steps is not None:
            fix = "set steps to null, or leave out epochs"
            raise ValueError(f"epochs: `steps: {self.steps}` also sets the length of the run; {fix}")
        fix = "set `steps` instead of epochs, or leave out"
        for name, env in self.envs.items():
            if env.curriculum is not None:
                problem = "contradicts `epochs`, because both set how often a task is drawn"
                raise ValueError(f"envs.{name}.curriculum: {problem}; {fix} the curriculum")
            if env.weight != 1.0:
                problem = "has no effect with `epochs`, because each task of every environment is drawn equally often"
                raise ValueError(f"envs.{name}.weight: {problem}; {fix} the weight")

    def _check_valid_episodes(self, name: str, env: EnvConfig, size: int) -> None:
        """Check that a group can reach its required number of valid episodes."""
        if (failing := env.max_failing_rollouts) is not None:
            field, limit = f"envs.{name}.max_failing_rollouts", size - min(size, 2)
            if env.min_valid is not None:
                raise ValueError(f"{field}: min_valid sets the same limit; leave out one of them")
            if failing > limit:
                problem = f"leaves {max(0, size - failing)} of {size} rollouts, but a group needs at least"
                raise ValueError(f"{field}: {problem} {min(size, 2)}; set it to {limit} or less")
            return
        min_valid = env.min_valid or self.rollouts.min_valid
        if min_valid > size and not (env.min_valid is None and self.rollouts.is_default("min_valid")):
            field = "rollouts.min_valid" if env.min_valid is None else f"envs.{name}.min_valid"
            problem = f"{min_valid} is more than the rollouts of a group of envs.{name}"
            raise ValueError(f"{field}: {problem}; set it to {size} or less")

    def _check_overrides(self) -> None:
        """Check that at least one environment uses each setting of the run."""
        for section, name in ((section, name) for section, names in _INHERITED.items() for name in names):
            holder = cast("Section", getattr(self, section)) if section else self
            users = [*self.envs.values(), *(self.eval.envs.values() if name in _EVALUATION_FIELDS else ())]
            alternative = _ALTERNATIVES.get(name, name)
            overrides = [any(getattr(user, key, None) is not None for key in (name, alternative)) for user in users]
            if all(overrides) and not holder.is_default(name):
                field = f"{section}.{name}" if section else name
                settings = name if alternative == name else f"{name} or {alternative}"
                raise ValueError(f"{field}: has no effect, because every environment sets its own {settings}")
        if len(self.envs) == 1 and (only := next(iter(self.envs.items())))[1].weight != 1.0:
            raise ValueError(f"envs.{only[0]}.weight: has no effect, because there is only one environment")
        for name, env in self.envs.items():
            if not env.newest_weights and not self.schedule.steps_ahead:
                reason = f"with the schedule {self.schedule.name} weights change only between rollouts"
                field = f"envs.{name}.newest_weights"
                raise ValueError(f"{field}: has no effect, because {reason}; set schedule.mode to async")

    @property
    def best_metric(self) -> str | None:
        """Metric that selects the best weights; None if there is none."""
        return self.best.metric or ("eval/all/reward/mean" if self.eval.envs else None)

    def _check_best(self) -> None:
        if (self.best.metric or "").startswith("eval/all/") and not self.eval.envs:
            raise ValueError("best.metric: there are no evaluations; add environments to eval.envs")
        if not self.checkpoint.is_default("keep_best") and not self.best_metric:
            raise ValueError("checkpoint.keep_best: has no effect, because no metric selects the best; set best.metric")
        for name in sorted(self.best.model_fields_set):
            if self.best_metric is None and not self.best.is_default(name):
                raise ValueError(f"best.{name} has no effect: add environments to eval.envs, or set best.metric")
        if self.best.metric is None:
            return
        remedies = self._absent_metrics()
        problem = metric_problem(self.best.metric, envs=self.envs, evals=self.eval.envs, remedies=remedies)
        place, _, divergence = self.best.metric.partition("/teacher/")
        fields = self.find_teachers(place.partition("/")[2]) if divergence and problem is None else {}
        names = ["kl", *(f"{field.rpartition('.')[2]}/kl" for field in fields if "teachers." in field)]
        if fields and divergence not in names:
            problem = f"no step has a {self.best.metric!r}; known: {', '.join(names)}"
        if problem is not None:
            raise ValueError(f"best.metric: {problem}")

    def _absent_metrics(self) -> dict[str, str]:
        """Return beginnings of metrics that no step has with these settings, each with a fix."""
        supervised = self.envs.keys() - self.reinforced_envs.keys()
        remedies = (
            (self.kl_penalty.coefficient, "kl_reference", "set kl_penalty.coefficient"),
            (any(map(self.find_teachers, self.envs)), "teacher", "set teacher"),
            *((self.find_teachers(env), f"env/{env}/teacher", "set teacher") for env in self.envs),
            *((self.find_teachers(env), f"eval/{env}/teacher", "set teacher") for env in self.eval.envs),
            *(
                (spec.temperature == 1, f"eval/{env}/teacher", f"set eval.envs.{env}.temperature to 1")
                for env, spec in self.eval.envs.items()
            ),
            (supervised, "optim/nll", "set source or warm_start"),
            (self.length_penalty.coefficient, "batch/length_penalty", "set length_penalty.coefficient"),
            (self.batch.clip_advantages, "batch/clipped", "set batch.clip_advantages"),
            (isinstance(self.loss, ClippedLoss), "optim/ratio/clipped", f"the loss {self.loss.name} clips nothing"),
        )
        names = [f"env/{env}/{metric}" for env in supervised for metric in REWARD_METRICS]
        if not self.reinforced_envs:
            names += [f"env/all/{metric}" for metric in REWARD_METRICS]
            names += ["optim/kl_sample", "optim/entropy", "optim/ratio/", "kl_reference/", "teacher/"]
        fix = "it needs rollouts; choose optim/nll, or a metric of eval.envs"
        return dict.fromkeys(names, fix) | {metric: fix for is_set, metric, fix in remedies if not is_set}

    def _check_objective(self) -> None:
        if isinstance(self.loss, Distillation):
            teachers = {key: value for env in self.reinforced_envs for key, value in self.find_teachers(env).items()}
            if not teachers:
                raise ValueError("loss: distillation needs a teacher; set teacher, or choose another loss")
            for field, key in product(teachers, ("discount", "clip")):
                if not teachers[field].is_default(key):
                    fix = "leave it out, or choose another loss"
                    raise ValueError(f"{field}.{key}: has no effect with the loss distillation; {fix}")
        if self.loss.normalization_problem and self.batch.normalize != "none":
            raise ValueError(f"batch.normalize: {self.loss.normalization_problem}")
        if self.steps is not None:
            self.optimizer.check_steps(self.steps)
        if self.length_penalty.coefficient:
            for name in self.envs:
                if self.length_penalty.from_tokens >= self.full_penalty_tokens(name):
                    limit = f"the {self.full_penalty_tokens(name)} tokens at which the penalty of envs.{name} is full"
                    start = self.length_penalty.from_tokens
                    raise ValueError(f"length_penalty.from_tokens: {start} must be below {limit}")

    def full_penalty_tokens(self, env: str) -> int:
        """Return the number of sampled tokens per episode at which an environment's length penalty is full."""
        return self.length_penalty.to_tokens or self.envs[env].max_tokens or self.sampling.max_tokens

    def refuse_turn_settings(self, single: Set[str]) -> None:
        """Raise ConfigError for a limit of turns, or a setting of later turns such as a discount, without effect.

        Args:
            single: environments whose tasks are known to have a single turn.
        """
        for name, env in self.envs.items():
            if name in single:
                refuse_turn_limit(env, field=f"envs.{name}")
        single = single | {name for name, env in self.envs.items() if env.max_turns == 1}
        own = {name: env.advantage for name, env in self.envs.items() if env.advantage is not None}
        sections = [(f"envs.{name}.advantage", advantage, {name}) for name, advantage in own.items()]
        for field, section, users in [("advantage", self.advantage, self.envs.keys() - own.keys()), *sections]:
            for setting in section.turn_settings:
                if users <= single and not section.is_default(setting):
                    reason = f"each task of {', '.join(sorted(users))} has a single turn"
                    raise ConfigError(f"{field}.{setting}: has no effect, because {reason}; leave out {setting}")

    def _check_estimator(self, field: str, advantage: Estimator, size: int) -> None:
        """Check that the groups and the schedule suit the estimator of an environment."""
        if (problem := advantage.size_problem(size)) is not None:
            raise ValueError(f"{field}: {problem}")
        if (problem := advantage.stream_problem) is not None and self.schedule.is_streaming:
            prefix = "" if self.envs[field.removeprefix("envs.")].advantage is None else f"{field}."
            raise ValueError(f"{prefix}advantage: {problem}")
