"""The sections of the objective and the optimiser: advantages, losses, penalties, adapter, learning rate.

Invariant: a setting without effect is an error. The docstring of a field gives the reason for its default.
"""

from __future__ import annotations

from collections import ChainMap
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from rlkit._util.sections import Positive, Section, SectionTable
from rlkit.algorithms.estimator import Estimator
from rlkit.algorithms.estimators import ESTIMATORS
from rlkit.algorithms.losses import LOSSES, LocalLoss, Loss


class CustomAdvantage(Estimator):
    """Your own function from a group to its advantages."""

    name: ClassVar = "custom"
    function: str
    """`package.module:name` or `file.py:name`."""

    def size_problem(self, size: int) -> str | None:  # noqa: D102  inherited
        return None


class CustomLoss(LocalLoss):
    """Your own loss function, computed on this machine. It costs a second pass over the batch."""

    name: ClassVar = "custom"
    function: str
    """`package.module:name` or `file.py:name` of a function from (data, log-probabilities) to (loss, metrics)."""


def _check_supported(value: object) -> object:
    """Reject the loss of the Tinker service that rlkit does not support, with the reason."""
    match value:
        case {"name": "stable_reinforce"}:
            reason = "it needs data about the sampling of each token that rlkit does not record"
            raise ValueError(f"stable_reinforce is not supported: {reason}; use cispo or ppo for off-policy data")
        case _:
            return value


def expand_name(value: str) -> dict[str, str]:
    """Expand the name of an estimator or a loss, or the import path of a function, to a section."""
    return {"name": "custom", "function": value} if ":" in value else {"name": value}


def _section(value: object) -> object:
    return expand_name(value) if isinstance(value, str) else value


_FORMS = "a name such as {}, a mapping with a name, or a function (in a file: file.py:name)"
_ESTIMATORS = ChainMap[str, type[Estimator]]({"custom": CustomAdvantage}, ESTIMATORS)
_ADVANTAGES = SectionTable(_ESTIMATORS, forms=_FORMS.format("grpo"))
_LOSSES = SectionTable(ChainMap[str, type[Loss]]({"custom": CustomLoss}, LOSSES), forms=_FORMS.format("ppo"))
type _Choice = Annotated[Estimator, _ADVANTAGES]
type AdvantageConfig = Annotated[_Choice, BeforeValidator(_section, json_schema_input_type=str | _Choice)]
type _LossChoice = Annotated[Loss, _LOSSES, BeforeValidator(_check_supported)]
type LossConfig = Annotated[_LossChoice, BeforeValidator(_section, json_schema_input_type=str | _LossChoice)]


class LengthPenaltyConfig(Section):
    """Penalty on the length of an episode, subtracted from its reward before advantages are estimated. It is 0 up to
    `from_tokens`, grows linearly, and is `coefficient` from `to_tokens` on. Recorded rewards do not change.
    """

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Full penalty, in units of the reward. 0 is off, because the penalty trades reward for brevity."""
    from_tokens: Annotated[int, Field(ge=0)] = 0
    """Sampled tokens per episode, over all turns, without a penalty. 0 penalises every token equally."""
    to_tokens: Annotated[int, Field(ge=1)] | None = None
    """Sampled tokens at which the penalty is full; null for the environment's `max_tokens`, which suits single-turn
    tasks."""

    def _check_section(self) -> None:
        if not self.coefficient:
            self.refuse_unused("from_tokens", "to_tokens", fix="set coefficient above 0")


class LoraConfig(Section):
    """The trained LoRA adapter."""

    rank: Positive = 32
    """Rank of the adapter; 32 is enough for reinforcement learning, which learns few bits per episode."""
    train_attn: bool = True
    """Adapt the attention projections."""
    train_mlp: bool = True
    """Adapt the MLP projections, which carry most of the gain."""
    train_unembed: bool = False
    """Adapt the output head. Off, because it costs a gradient over the whole vocabulary and gains little."""

    def _check_section(self) -> None:
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ValueError("no parameters are trained: set train_attn, train_mlp or train_unembed to true")


_RATE_MAX = 1000.0  # limit of the embedded engine; beyond it, weights diverge immediately


def _validate_rate(value: object, check: ValidatorFunctionWrapHandler) -> float | Literal["auto"]:
    """Validate a rate, with one message for numbers and for `auto`."""
    try:
        rate = check(value)
    except ValueError:
        raise PydanticCustomError("rate", "a number above 0, or auto") from None
    if isinstance(rate, float) and rate > _RATE_MAX:
        limit = f"{_RATE_MAX:g}"
        raise PydanticCustomError("rate", "at most {limit}, the service's limit", {"limit": limit})
    return rate


class OptimizerConfig(Section):
    """Adam, and its learning-rate schedule."""

    learning_rate: Annotated[Annotated[float, Field(gt=0)] | Literal["auto"], WrapValidator(_validate_rate)] = 1e-4
    """Learning rate after the warm-up. LoRA needs at least ten times the rate of full fine-tuning. `auto` uses
    tinker-cookbook's recommendation for the model, and is an error if there is none."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate from the warm-up to the end of the run; `constant`, so that a run can be extended."""
    final_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """With `linear` and `cosine`: fraction of the learning rate at the end, reached one step after the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up. 0, because early on-policy gradients are as good as later gradients. Adam's bias
    correction already keeps the first steps small."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of Adam's mean of gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of Adam's mean of squared gradients; below the usual 0.999, because RL gradients change quickly."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Constant that Adam adds to the denominator."""
    weight_decay: Annotated[float, Field(ge=0, le=_RATE_MAX)] = 0.0
    """Weight decay of the adapter. 0 is off, because the adapter starts at zero and stays small."""
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0
    """Maximum norm of a step's gradient; 0 is off."""

    def _check_section(self) -> None:
        if self.schedule == "constant":
            self.refuse_unused("final_fraction", fix="set schedule to linear or cosine")

    def check_steps(self, steps: int) -> None:
        """Raise ValueError if the warm-up or the schedule has no effect in a run of `steps` steps."""
        if self.warmup_steps >= steps and self.warmup_steps:
            problem = f"the run ends after {steps} steps, before the full learning rate"
            raise ValueError(f"optimizer.warmup_steps: {problem}; set it below {steps}")
        if self.schedule != "constant" and steps - self.warmup_steps == 1:
            reason = "the run has only one step after the warm-up, and the learning rate begins to fall at the second"
            fix = "set it to constant, or train for longer"
            raise ValueError(f"optimizer.schedule: {self.schedule} has no effect, because {reason}; {fix}")
