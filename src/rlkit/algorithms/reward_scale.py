"""Rewards made fit to be compared: which are equal, and the unit in which they are computed with.

Invariants: changing the unit is exact, and sums and squares in it can neither overflow nor vanish; what differs only by
rounding is equal.
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


def spread(rewards: Values, formula: Callable[[Values], Values], *, scaled: bool, valid: Bools | None = None) -> Values:
    """[G]: what a formula makes of the rewards of the valid episodes; 0 for the others, and for all if they are equal.

    Args:
        rewards: [G].
        formula: from rewards [n], not all equal and in a unit in which none is above 1, to advantages [n].
        scaled: whether these grow with the rewards, and so are to be put back into their unit.
        valid: [G]; None for those with a finite reward.
    """
    valid = np.isfinite(rewards) if valid is None else valid
    advantages = np.zeros(len(rewards))
    unit = exponent(rewards[valid])
    values = settled(np.ldexp(rewards[valid], -unit))
    if len(values) and values.min() < values.max():
        found = formula(values)
        advantages[valid] = in_unit(found, unit) if scaled else found
    return advantages


def exponent(values: Values) -> int:
    """e with |values| ≤ 2^e: in that unit sums and squares cannot overflow, and changing to it and back is exact."""
    return int(np.frexp(np.abs(values).max(initial=0.0))[1])


def in_unit(values: Values, unit: int) -> Values:
    """Values times 2^unit; a difference of rewards near both ends of the range stays within it."""
    with np.errstate(over="ignore"):
        return np.clip(np.ldexp(values, unit), -float_info.max, float_info.max)


def settled(values: Values) -> Values:
    """[n] values, of which those that are equal are made exactly so, to the least of them."""
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    new = np.diff(ascending, prepend=-np.inf) > EQUAL * np.abs(values).max(initial=0.0)
    merged = np.empty_like(values)
    merged[order] = ascending[new][np.cumsum(new) - 1]
    return merged


def has_spread(values: Values) -> bool:
    """Whether not all of [n] values are equal."""
    found = settled(np.ldexp(values, -exponent(values)))
    return len(found) > 0 and bool(found.min() < found.max())


def centred(values: Values) -> Values:
    """[n] values minus their mean."""
    return values - values.mean()
