"""Equality of rewards, and the unit that they are computed in.

Invariants: changing the unit is exact, and sums and squares in it can neither overflow nor vanish; rewards that differ
only by rounding are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import float_info
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlkit.types import Bools

type Values = NDArray[np.float64]

EQUAL = 1e-9
"""Share of the largest reward up to which two are equal: far above what the order of a sum changes in float64, so that
no estimator divides by rounding errors, and far below what a grader means to tell apart."""


def map_rewards(
    rewards: Values, formula: Callable[[Values], Values], *, in_reward_units: bool, valid: Bools | None = None
) -> Values:
    """Return [G] advantages by a formula of the valid rewards; 0 for other episodes, and for all if these are equal.

    Args:
        rewards: [G].
        formula: from rewards [n], not all equal and in a unit in which none is above 1, to advantages [n].
        in_reward_units: the advantages grow with the rewards, and are put back into their unit.
        valid: [G]; None for those with a finite reward.
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
    """Return e with |values| ≤ 2^e; a change to this unit and back is exact."""
    return int(np.frexp(np.abs(values).max(initial=0.0))[1])


def in_unit(values: Values, unit: int) -> Values:
    """Return values times 2^unit, clipped to the range of float64."""
    with np.errstate(over="ignore"):
        return np.clip(np.ldexp(values, unit), -float_info.max, float_info.max)


def merge_equal(values: Values) -> Values:
    """Return [n] values in which equal ones are exactly so, as the least of them."""
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    is_new = np.diff(ascending, prepend=-np.inf) > EQUAL * np.abs(values).max(initial=0.0)
    merged = np.empty_like(values)
    merged[order] = ascending[is_new][np.cumsum(is_new) - 1]
    return merged


def has_spread(values: Values) -> bool:
    """Return whether [n] values are not all equal."""
    merged = merge_equal(np.ldexp(values, -exponent(values)))
    return len(merged) > 0 and bool(merged.min() < merged.max())


def centre(values: Values) -> Values:
    """Return [n] values minus their mean."""
    return values - values.mean()
