"""The part of the schema that says what is optimised, and how: advantages, losses, penalties, adapter, optimiser.

Invariant: as in the rest of the schema, what would have no effect is an error, and a default carries its reason.
"""

from __future__ import annotations

from collections import ChainMap
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from rlkit._util.sections import Positive, Section, SectionTable
from rlkit.algorithms.estimator import Estimator
from rlkit.algorithms.estimators import ESTIMATORS
from rlkit.algorithms.losses import LOSSES, LocalLoss, Loss


class CustomAdvantage(Estimator):
    """A function of your own, from a group to its advantages."""

    name: ClassVar = "custom"
    function: str
    """`package.module:name` or `file.py:name`."""

    def size_problem(self, size: int) -> str | None:  # noqa: D102  inherited
        return None


class CustomLoss(LocalLoss):
    """A function of your own, run on this machine. It costs a second pass over the batch."""

    name: ClassVar = "custom"
    function: str
    """`package.module:name` or `file.py:name` of a function from (data, log-probabilities) to (loss, metrics)."""


_OTHERS = {
    "stable_reinforce": "it wants to know where the service sampled each token, which rlkit does not record; "
    "use cispo or ppo for off-policy data",
    "cross_entropy": "it imitates and has no use for advantages; use importance_sampling",
}


def _of_this_kind(value: object) -> object:
    """Refuse the losses of the Tinker service that cannot be used, with the reason."""
    name = value.get("name") if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  anything may stand in a file
    if isinstance(name, str) and name in _OTHERS:
        raise ValueError(f"{name} cannot be trained with: {_OTHERS[name]}")
    return value  # pyright: ignore[reportUnknownVariableType]  the table checks it


def written_out(value: str) -> dict[str, str]:
    """Return the section that the name of an estimator, or the import path of a function, is short for."""
    return {"name": "custom", "function": value} if ":" in value else {"name": value}


def _section(value: object) -> object:
    return written_out(value) if isinstance(value, str) else value


_ADVANTAGES = SectionTable(ChainMap[str, type[Estimator]]({"custom": CustomAdvantage}, ESTIMATORS))
_LOSSES = SectionTable(ChainMap[str, type[Loss]]({"custom": CustomLoss}, LOSSES))
type _Choice = Annotated[Estimator, _ADVANTAGES]
type AdvantageConfig = Annotated[_Choice, BeforeValidator(_section, json_schema_input_type=str | _Choice)]
type LossConfig = Annotated[Loss, _LOSSES, BeforeValidator(_of_this_kind)]


class KLPenaltyConfig(Section):
    """A penalty on each sampled token for how much likelier it is than under a reference. It costs a pass of the
    reference over every sequence; its advantages are centred in the group, so that it says only which tokens went
    further than the others.
    """

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Advantage for each nat of log-probability; 0 is off, since a LoRA that is trained on-policy rarely strays."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How much a token answers for the sampled tokens after it, by the power of their distance; at 0 only for itself,
    which has the least variance."""
    reference: str = "base"
    """`base` for the model without an adapter, or the `tinker://…/sampler_weights/…` path of a checkpoint."""

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        if not self.coefficient:
            self.refuse_unused("discount", "reference", fix="set coefficient above 0")
        if self.reference != "base" and (not self.reference.startswith("tinker://") or "/weights/" in self.reference):
            raise ValueError(
                f"reference: {self.reference!r} is neither base nor a path of the form tinker://…/sampler_weights/…"
            )
        return self


class LengthPenaltyConfig(Section):
    """What is subtracted from an episode's reward for its length, before advantages are estimated: nothing up to
    `from_tokens`, `coefficient` from `to_tokens` on, and linear in between. Recorded rewards stay as they are.
    """

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """The whole penalty, in units of the reward; 0 is off, since it trades reward for brevity."""
    from_tokens: Annotated[int, Field(ge=0)] = 0
    """Sampled tokens of an episode, over all its turns, that cost nothing; by default each one costs the same."""
    to_tokens: Annotated[int, Field(ge=1)] | None = None
    """Sampled tokens at which the penalty is full; null for the environment's `max_tokens`, which suits one turn."""

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        if not self.coefficient:
            self.refuse_unused("from_tokens", "to_tokens", fix="set coefficient above 0")
        return self


class LoraConfig(Section):
    """The adapter that is trained."""

    rank: Positive = 32
    """Enough for reinforcement learning, which learns few bits an episode."""
    train_attn: bool = True
    """Adapt the attention projections."""
    train_mlp: bool = True
    """Adapt the MLP projections, which carry most of the gain."""
    train_unembed: bool = False
    """Adapt the output head. Off: it costs a gradient over the whole vocabulary and gains little."""

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ValueError("nothing is trained: set train_attn, train_mlp or train_unembed to true")
        return self


_STEP_MAX = 1000.0
"""Beyond this the embedded engine refuses a step: weights go where no number of theirs means anything."""


def _rate_or_auto(value: object, check: ValidatorFunctionWrapHandler) -> float | Literal["auto"]:
    """One message for both kinds of value."""
    try:
        rate = check(value)
    except ValueError:
        raise PydanticCustomError("rate", "a number above 0, or auto") from None
    if isinstance(rate, float) and rate > _STEP_MAX:
        limit = f"{_STEP_MAX:g}"
        raise PydanticCustomError("rate", "at most {limit}, the service's limit", {"limit": limit})
    return rate


class OptimizerConfig(Section):
    """Adam, and its learning rate over the run."""

    learning_rate: Annotated[
        Annotated[float, Field(gt=0)] | Literal["auto"],
        WrapValidator(_rate_or_auto),
    ] = 1e-4
    """LoRA wants ten times what full fine-tuning does, or more. `auto` takes what tinker-cookbook advises for the model
    and is refused where it has no advice."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls from the warm-up to the end of the run; constant, so that a run can be prolonged."""
    final_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """With `linear` and `cosine`: share of the rate that is left where the run ends; the step after the last would be
    the first with it."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps before the first with the whole rate, over which it rises in equal parts. None: on-policy gradients are as
    good at the start as later, and Adam's own correction keeps its first steps small."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the mean of squared gradients: shorter than Adam's own, since the gradients of RL change quickly."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0, le=_STEP_MAX)] = 0.0
    """Off: the adapter starts at zero and stays small."""
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0
    """Largest norm of a step's gradient; 0 is off."""

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        if self.schedule == "constant":
            self.refuse_unused("final_fraction", fix="set schedule to linear or cosine")
        return self

    def check_steps(self, steps: int) -> None:
        """Raise ValueError if a run of so many steps has no use for the warm-up or for the schedule."""
        if self.warmup_steps >= steps and self.warmup_steps:
            raise ValueError(
                f"optimizer.warmup_steps: the run's {steps} steps end before the learning rate is reached; "
                f"set it below {steps}"
            )
        if self.schedule != "constant" and steps - self.warmup_steps == 1:
            raise ValueError(
                f"optimizer.schedule: {self.schedule} has no effect, since the learning rate falls from the second "
                "step after the warm-up on and the run has one; set it to constant, or train for longer"
            )
