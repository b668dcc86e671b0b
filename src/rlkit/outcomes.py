"""What an environment returned, checked.

Invariant: an outcome that passes holds finite numbers only.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import cast

import numpy as np

from rlkit.errors import RewardError
from rlkit.types import Outcome


def as_outcome(result: object) -> Outcome:
    """The outcome that a rollout returned; a bare number is one.

    Raises:
        RewardError: it is neither, or a reward or metric is not a finite number.
    """
    outcome = result if isinstance(result, Outcome) else None
    reward = outcome.reward if outcome else result
    value = _real(reward)
    if value is None:
        raise RewardError(f"the environment returned {_shown(reward)}; a rollout returns an Outcome or a number")
    if not math.isfinite(value):
        raise RewardError(f"the environment returned the reward {value}; rewards must be finite")
    if outcome is None:
        return Outcome(value)
    return Outcome(value, _numbers(outcome.metrics), outcome.info, outcome.truncated)


def _numbers(metrics: object) -> Mapping[str, float]:
    if not isinstance(metrics, Mapping):
        raise RewardError(f"the environment returned the metrics {_shown(metrics)}; metrics map names to numbers")
    checked = dict[str, float]()
    for name, value in cast("Mapping[object, object]", metrics).items():
        number = _real(value)
        if number is None or not math.isfinite(number):
            raise RewardError(
                f"the environment returned the metric {name} = {_shown(value)}; it must be a finite number"
            )
        checked[str(name)] = number
    return checked


def _real(value: object) -> float | None:
    """The value of a real number of Python or numpy; None for anything else."""
    number = cast("object", value.item()) if isinstance(value, np.generic) else value
    return float(number) if isinstance(number, numbers.Real) else None


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
