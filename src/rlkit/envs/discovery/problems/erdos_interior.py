"""Interior-point descent for Erdős' minimum overlap, with NumPy and SciPy only.

Each step is a Newton step of min t − μ (Σ log(t − O_m) + Σ log h_i + Σ log(1 − h_i)) with Σ h = n/2, where the overlaps
O_m are linear to first order, and μ falls. One step factorises a matrix of the free heights: a descent of 600 pieces
takes seconds, while a sequence of linear programs takes minutes. Source of the method: Boyd and Vandenberghe 2004,
Convex Optimization, chapter 11.

Pieces outside of a centre may be tied to their mirror images. The best known constructions are symmetric there, and
their centre is not.

Invariant: a result is a valid construction that is at least as good as the initial construction.
"""

from __future__ import annotations

import time
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

type Heights = NDArray[np.float64]

_MARGIN = 1e-6  # distance from 0 and 1 at the beginning, because logarithms need it
_FRACTION = 0.995  # greatest share of the way to a bound in one step
_DUAL_RANGE = 1e8  # greatest factor between a multiplier and its value on the central path
_ROW_SHARE = 1e-9  # overlaps with a smaller weight do not change the matrix
_GAP = 1e-13


class _Point(NamedTuple):
    """Free heights, the bound t, all heights, overlaps, and t minus the overlaps."""

    free: Heights
    bound: float
    h: Heights
    overlaps: Heights
    slack: Heights


class _Multipliers(NamedTuple):
    """Multipliers of the overlaps, of h ≥ 0, and of h ≤ 1."""

    overlap: Heights
    low: Heights
    high: Heights


class Mirrored:
    """Heights whose pieces outside of a centre are tied to their mirror images.

    Args:
        count: number of pieces.
        centre: number of pieces in the middle that are free; 0 for symmetric heights.
    """

    def __init__(self, count: int, centre: int) -> None:
        self.count = count
        self.tied = max(count - centre, 0) // 2
        self.weights = np.concatenate([np.full(self.tied, 2.0), np.ones(count - 2 * self.tied)])
        self.first = count - 1 if 2 * self.tied == count else 0
        """Index of the first overlap: those of symmetric heights are symmetric too."""

    def expand(self, free: Heights) -> Heights:
        """Return all [n] heights."""
        return np.concatenate([free, free[: self.tied][::-1]])

    def mean(self, h: Heights) -> Heights:
        """Return the free heights; tied ones become the mean of both."""
        return self.fold(h) / self.weights

    def fold(self, slopes: Heights) -> Heights:
        """Return [..., n] derivatives as derivatives by the free heights."""
        folded = slopes[..., : self.count - self.tied].copy()
        folded[..., : self.tied] += slopes[..., ::-1][..., : self.tied]
        return folded


def interior_point(
    h: Heights, *, centre: int | None = None, barrier: float = 1e-6, steps: int = 250, end_s: float = np.inf
) -> Heights:
    """Minimise the maximum overlap of [n] heights from a start within [0, 1].

    Args:
        centre: number of pieces in the middle that are not tied to their mirror images; None for all. Other pieces
            become the mean of both.
        barrier: first μ; a greater one moves farther from the start.
        steps: maximum number of Newton steps.
        end_s: processor time after which no new step starts.
    """
    ties = Mirrored(len(h), len(h) if centre is None else centre)
    best = ties.expand(ties.mean(h))
    point = _enter(ties, ties.mean(h), barrier)
    multipliers = _Multipliers(*(barrier / each for each in (point.slack, point.free, 1 - point.free)))
    best_value = float(compute_overlaps(best).max()) if abs(float(best.sum()) - len(h) / 2) < 1e-9 else np.inf
    for _ in range(steps):
        if time.process_time() >= end_s or not np.isfinite(point.bound):
            break
        try:
            direction, slope = _newton(ties, point, multipliers, barrier)
        except np.linalg.LinAlgError:
            break
        point, moved = _walk(ties, point, direction, slope, barrier)
        multipliers = _update(multipliers, direction, point, barrier)
        if (value := float(point.overlaps.max())) < best_value:
            best, best_value = point.h, value
        if not moved or -slope < 40 * barrier * len(h):
            if barrier <= _GAP:
                break
            barrier = max(barrier / 2, _GAP)
    return best


class _Direction(NamedTuple):
    free: Heights
    bound: float
    multipliers: _Multipliers


def _enter(ties: Mirrored, free: Heights, barrier: float) -> _Point:
    """Return a point inside of all bounds whose heights sum to n/2."""
    free = np.clip(free, _MARGIN, 1 - _MARGIN)
    for _ in range(30):
        missing = ties.count / 2 - float(ties.weights @ free)
        room = free * (1 - free)
        free = np.clip(free + missing * room / float(ties.weights @ room), _MARGIN / 100, 1 - _MARGIN / 100)
    top = float(compute_overlaps(ties.expand(free)).max())
    return _place(ties, free, top + 50 * barrier)


def _place(ties: Mirrored, free: Heights, bound: float) -> _Point:
    h = ties.expand(free)
    overlaps = compute_overlaps(h)[ties.first :]
    return _Point(free, bound, h, overlaps, bound - overlaps)


def _newton(ties: Mirrored, point: _Point, multipliers: _Multipliers, barrier: float) -> tuple[_Direction, float]:
    """Return the Newton direction, and the derivative of the barrier function along it."""
    from scipy.linalg import cho_factor, cho_solve  # pyright: ignore[reportUnknownVariableType]  SciPy has few types

    count, free, slack = ties.count, point.free, point.slack
    gradient = overlap_gradient(ties, point.h, barrier / slack) - barrier / free + barrier / (1 - free)
    gradient_bound = 1 - float((barrier / slack).sum())
    curvature = multipliers.overlap / slack
    rows = np.flatnonzero(curvature > _ROW_SHARE * curvature.max())
    slopes = compute_slopes(ties, point.h, rows)
    scaled = slopes * np.sqrt(curvature[rows])[:, None]
    matrix = scaled.T @ scaled
    border, corner = -(slopes.T @ curvature[rows]), float(curvature[rows].sum())
    matrix -= np.outer(border, border) / corner  # without t
    diagonal = multipliers.low / free + multipliers.high / (1 - free)
    matrix.flat[:: len(free) + 1] += diagonal + 1e-9 * float(np.median(diagonal))
    right = np.column_stack([border * gradient_bound / corner - gradient, ties.weights])
    solved = cast("Heights", cho_solve(cho_factor(matrix, check_finite=False), right, check_finite=False))
    # The second column keeps the sum of the heights.
    step = solved[:, 0] - solved[:, 1] * float(ties.weights @ solved[:, 0]) / float(ties.weights @ solved[:, 1])
    step_bound = (-gradient_bound - float(border @ step)) / corner
    change = ties.expand(step)
    products = np.correlate(change, 1 - point.h, "full") - np.correlate(point.h, change, "full")
    step_slack = step_bound - (products * (2 / count))[ties.first :]
    steps = _Multipliers(
        (barrier - multipliers.overlap * step_slack) / slack - multipliers.overlap,
        (barrier - multipliers.low * step) / free - multipliers.low,
        (barrier + multipliers.high * step) / (1 - free) - multipliers.high,
    )
    return _Direction(step, step_bound, steps), float(gradient @ step) + gradient_bound * step_bound


def _walk(ties: Mirrored, point: _Point, direction: _Direction, slope: float, barrier: float) -> tuple[_Point, bool]:
    """Return the point after a step that lowers the barrier function, and whether there is one."""
    length = min(_longest(point.free, direction.free), _longest(1 - point.free, -direction.free))
    before = _barrier_value(point, barrier)
    for _ in range(25):
        after = _place(ties, point.free + length * direction.free, point.bound + length * direction.bound)
        if after.slack.min() > 0 and _barrier_value(after, barrier) <= before + 1e-4 * length * slope + 1e-15:
            return after, True
        length /= 2
    return point, False


def _update(multipliers: _Multipliers, direction: _Direction, point: _Point, barrier: float) -> _Multipliers:
    """Return the multipliers after a step, within a range around their values on the central path."""
    pairs = list(zip(multipliers, direction.multipliers, strict=True))
    length = min(_longest(values, steps) for values, steps in pairs)
    central = (barrier / point.slack, barrier / point.free, barrier / (1 - point.free))
    return _Multipliers(
        *(
            np.clip(values + length * steps, middle / _DUAL_RANGE, middle * _DUAL_RANGE)
            for (values, steps), middle in zip(pairs, central, strict=True)
        )
    )


def _barrier_value(point: _Point, barrier: float) -> float:
    logarithms = np.log(point.slack).sum() + np.log(point.free).sum() + np.log(1 - point.free).sum()
    return point.bound - barrier * float(logarithms)


def _longest(values: Heights, steps: Heights) -> float:
    """Return the share of a step that keeps positive values positive, at most 1."""
    return min(1.0, _FRACTION / max(float((-steps / values).max()), 1e-30))


def compute_overlaps(h: Heights) -> Heights:
    """Return the [2n − 1] overlaps of [n] heights at all shifts."""
    return np.correlate(h, 1 - h, mode="full") * (2 / len(h))


def compute_gradient(h: Heights, weights: Heights) -> Heights:
    """Return [n] Σ_m w_m ∂O_m/∂h_j for the overlaps O_m at the [2n − 1] shifts."""
    ahead = np.convolve(weights, 1 - h, mode="valid")
    behind = np.correlate(weights, h, mode="valid")[::-1]
    return (ahead - behind) * (2 / len(h))


def overlap_gradient(ties: Mirrored, h: Heights, weights: Heights) -> Heights:
    """Return Σ_m w_m ∂O_m by the free heights."""
    return ties.fold(compute_gradient(h, np.pad(weights, (ties.first, 0))))


def compute_slopes(ties: Mirrored, h: Heights, rows: NDArray[np.intp]) -> Heights:
    """Return the derivatives of some overlaps by the free heights: [rows, free]."""
    outside = np.zeros(ties.count - 1)
    ahead, behind = (
        np.lib.stride_tricks.sliding_window_view(np.concatenate([outside, each, outside]), ties.count)
        for each in (1 - h, h)
    )
    shifts = rows + ties.first
    return ties.fold((ahead[::-1][shifts] - behind[shifts]) * (2 / ties.count))
