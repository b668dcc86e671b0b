"""The section that chooses an advantage estimator: its name, and the settings that this one has.

Invariant: a name alone, or the import path of a function, is short for a section, and nothing else is. Only an
estimator that uses a setting takes it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlkit.config.schema.section import Section

type Clip = Annotated[float, Field(gt=0)]
type Divergence = Annotated[float, Field(gt=0)]


class PlainAdvantage(Section):
    """An estimator without settings."""

    name: Literal[
        "group_mean",
        "grpo",
        "rloo",
        "batch_std",
        "reinforce_pp_baseline",
        "opo",
        "maxrl",
        "median_mad",
        "best_vs_second",
        "rank",
    ]
    """The estimator."""


class PkpoAdvantage(Section):
    """The gradient of the best of k attempts (PKPO)."""

    name: Literal["pkpo"]
    """The estimator."""
    k: Annotated[int, Field(ge=2)] = 4
    """Attempts of which the best counts: half of the default group, since k near the group's size leaves only its best
    episode. With k = 1 it would be the plain mean, which `rloo` estimates with a baseline."""


class EntropicAdvantage(Section):
    """Weights exp(βr) against those of the others, with β as it is given."""

    name: Literal["entropic"]
    """The estimator."""
    beta: Annotated[float, Field(gt=0)] = 2.0
    """How much a higher reward counts for, in 1/reward; it is the value of the TTT-Discover ablation."""
    clip: Clip = 16.0
    """Largest advantage: without it, the one good episode of 64 would weigh a hundred times what the others do."""


class EntropicAdaptiveAdvantage(Section):
    """As `entropic`, with the β at which the weights are a set distance from equal ones."""

    name: Literal["entropic_adaptive"]
    """The estimator."""
    kl: Divergence = 0.6931471805599453
    """KL divergence of the weights from equal ones, in nats; ln 2 is as if half of the group were left out."""
    clip: Clip = 16.0
    """Largest advantage."""


class EntropicValidAwareAdvantage(Section):
    """As `entropic_adaptive` among the episodes that gave something valid; the others are pushed down alike."""

    name: Literal["entropic_valid_aware"]
    """The estimator."""
    kl: Divergence = 0.6931471805599453
    """KL divergence of the weights of the valid episodes from equal ones, in nats."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """What an invalid episode gets, as a negative advantage: 1 is the least that a valid one can get."""
    clip: Clip = 16.0
    """Largest advantage."""


class QuantileAdvantage(Section):
    """Deviations from a quantile instead of the mean."""

    name: Literal["quantile"]
    """The estimator."""
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """Share of the group that lies at or below the baseline; the value of the paper."""


class TurnReturnsAdvantage(Section):
    """One advantage for each turn: what followed it, against what followed the same turn of the others."""

    name: Literal["turn_returns"]
    """The estimator."""
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Factor for each turn that a reward comes later; 1 keeps to the episode's own reward as the aim."""


class CustomAdvantage(Section):
    """A function of your own, from a group to its advantages."""

    name: Literal["custom"]
    """The estimator."""
    function: str
    """`package.module:name` or `file.py:name`."""


type _Choice = Annotated[
    PlainAdvantage
    | PkpoAdvantage
    | EntropicAdvantage
    | EntropicAdaptiveAdvantage
    | EntropicValidAwareAdvantage
    | QuantileAdvantage
    | TurnReturnsAdvantage
    | CustomAdvantage,
    Field(discriminator="name"),
]


OF_WHOLE_STEPS = ("batch_std", "reinforce_pp_baseline")
"""Estimators that see all groups of a step."""


SEARCHING = ("entropic_adaptive", "entropic_valid_aware")
"""Estimators that look for a temperature, and say whether they found one."""


def needs_whole_steps(estimator: str) -> str:
    """Why an estimator of whole steps cannot be used with the schedule `stream`."""
    return (
        f"the estimator {estimator} needs all groups of a step at once, and with the schedule `stream` "
        "gradients are computed before they are there: set schedule.mode to sync or async, or choose another advantage"
    )


def written_out(value: str) -> dict[str, str]:
    """The section that a name or an import path is short for."""
    return {"name": "custom", "function": value} if ":" in value else {"name": value}


def _section(value: object) -> object:
    return written_out(value) if isinstance(value, str) else value


type AdvantageConfig = Annotated[_Choice, BeforeValidator(_section, json_schema_input_type=str | _Choice)]
