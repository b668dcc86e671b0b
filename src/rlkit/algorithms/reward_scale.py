"""Scale rewards to [−1, 1] by powers of two, and merge rewards that differ only by rounding.

Invariant: scaling is exact, and sums and squares of scaled rewards neither overflow nor underflow.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import float_info

import numpy as np
from numpy.typing import NDArray

from rlkit.types import Bools

type Values = NDArray[np.float64]

EQUAL = 1e-9
"""Two rewards are equal if they differ by at most this fraction of the largest absolute reward. It is far above
rounding errors, by which no estimator may divide, and far below differences that a grader intends."""


def map_rewards(
    rewards: Values, formula: Callable[[Values], Values], *, in_reward_units: bool, valid: Bools | None = None
) -> Values:
    """Return [G] advantages: `formula` of the valid rewards, or 0 if these are equal; 0 for invalid rewards.

    Args:
        rewards: [G].
        formula: function from [n] rewards, not all equal and scaled to [−1, 1], to [n] advantages.
        in_reward_units: scale the advantages back to the unit of the rewards.
        valid: [G]; None for all finite rewards.
    """
    valid = np.isfinite(rewards) if valid is None else valid
    advantages = np.zeros(len(rewards))
    unit = exponent(rewards[valid])
    values = merge_equal(np.ldexp(rewards[valid], -unit))
    if len(values) and values.min() < values.max():
        result = formula(values)
        advantages[valid] = in_unit(result, unit) if in_reward_units else result
    return advantages


def exponent(values: Values) -> int:
    """Return the unit of values as an exponent e, |values| ≤ 2^e; scaling by 2^−e and back is exact."""
    return int(np.frexp(np.abs(values).max(initial=0.0))[1])


def in_unit(values: Values, unit: int) -> Values:
    """Return values times 2^unit, clipped to the range of float64."""
    with np.errstate(over="ignore"):
        return np.ldexp(values, unit).clip(-float_info.max, float_info.max)


def merge_equal(values: Values) -> Values:
    """Return [n] values with each set of almost equal values replaced by its minimum."""
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    is_new = np.diff(ascending, prepend=-np.inf) > EQUAL * np.abs(values).max(initial=0.0)
    merged = np.empty_like(values)
    merged[order] = ascending[is_new][np.cumsum(is_new) - 1]
    return merged


def centre(values: Values) -> Values:
    """Return [n] values minus their mean."""
    return values - values.mean()
