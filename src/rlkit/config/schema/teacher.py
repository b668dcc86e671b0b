"""The sections of the models whose log-probabilities enter the advantages: the KL penalty's reference, and teachers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from rlkit._util.sections import Positive, Section
from rlkit.config.schema.operation import PricesConfig

_SAMPLER_PATH = "a path of the form tinker://…/sampler_weights/…"


class KLPenaltyConfig(Section):
    """Penalty on each sampled token, proportional to its log-probability ratio to a reference model. It costs a pass of
    the reference over every sequence. Penalties are centred in the group, so only differences between tokens matter."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Advantage per nat of log-probability ratio. 0 is off, because on-policy LoRA training rarely drifts."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Discount of the penalties of later tokens, per token of distance. 0 counts only the token's own penalty, because
    this has the least variance."""
    reference: str = "base"
    """Reference model: `base` without an adapter, or the `tinker://…/sampler_weights/…` path of a checkpoint."""

    def _check_section(self) -> None:
        if not self.coefficient:
            self.refuse_unused("discount", "reference", fix="set coefficient above 0")
        if self.reference != "base" and not _is_sampler_path(self.reference):
            raise ValueError(f"reference: {self.reference!r} is neither base nor {_SAMPLER_PATH}")


class TeacherConfig(Section):
    """Model of the service that the policy learns to imitate: on-policy distillation. Each sampled token gets the
    advantage −weight · (log q − log p). q is the policy's probability of the token, and p the teacher's. It costs a
    pass of the teacher over every sequence."""

    model: Annotated[str, Field(min_length=1)] | None = None
    """Base model; its tokenizer must be that of the run's model. Null for the run's model."""
    checkpoint: str | None = None
    """`tinker://…/sampler_weights/…` path of a checkpoint of the model; null for the model itself."""
    prompt: str | None = None
    """`package.module:name` or `file.py:name` of a function that returns the teacher's messages for the messages of a
    prompt. It can add a system prompt, for example. Null for the same prompt."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Advantage per nat of log-probability ratio. It is added to the advantages of rewards, if any."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Discount of the ratios of later tokens, per token of distance. 0 counts only the token's own ratio, because this
    has the least variance."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Largest absolute log-probability ratio of a token, in nats; larger ratios are clipped. Null for no limit, because
    tokens that are rare under the teacher must stay rare."""
    first_step: Positive = 1
    """First training step with the teacher."""
    last_step: Positive | None = None
    """Last training step with the teacher; null for the end of the run."""
    prices: PricesConfig = PricesConfig()
    """Prices of the teacher's model, in US dollars per million tokens; all null for rlkit's price table."""

    def _check_section(self) -> None:
        if self.checkpoint is not None and not _is_sampler_path(self.checkpoint):
            raise ValueError(f"checkpoint: {self.checkpoint!r} is not {_SAMPLER_PATH}")
        if self.last_step is not None and self.last_step < self.first_step:
            raise ValueError(f"last_step: {self.last_step} is before first_step, {self.first_step}")

    def is_model(self, model: str) -> bool:
        """Return whether the teacher is a model without an adapter or a prompt of its own."""
        return self.model in (None, model) and self.checkpoint is None and self.prompt is None


def check_windows(teachers: Mapping[str, TeacherConfig], *, first: int, last: int) -> bool:
    """Return whether a teacher, of these by their fields, counts in each step from `first` to `last`, 0 if unknown.

    Raises:
        ValueError: a teacher counts in no step.
    """
    covered = float(first - 1)  # the last step up to which each step has a teacher
    for field, teacher in sorted(teachers.items(), key=lambda item: item[1].first_step):
        if 0 < last < teacher.first_step:
            raise ValueError(f"{field}.first_step: {teacher.first_step} is after the last step, {last}")
        if (teacher.last_step or first) < first:
            raise ValueError(f"{field}.last_step: {teacher.last_step} is within the warm start of {first - 1} steps")
        if teacher.first_step <= covered + 1:
            covered = max(covered, teacher.last_step or math.inf)
    return covered >= (last or math.inf)


def _is_sampler_path(path: str) -> bool:
    return path.startswith("tinker://") and "/weights/" not in path
