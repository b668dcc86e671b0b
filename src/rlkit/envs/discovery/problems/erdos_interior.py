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
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlkit.envs.discovery.problems.minimax import factorise, limit_length

type Heights = NDArray[np.float64]
type Clock = Callable[[], float]

_MARGIN = 1e-6  # distance from 0 and 1 at the beginning, because logarithms need it
_DUAL_RANGE = 1e8  # greatest factor between a multiplier and its value on the central path
_ROW_SHARE = 1e-9  # overlaps with a smaller weight do not change the matrix
_GAP = 1e-13


class _Point(NamedTuple):
    """Free heights, the bound t, all heights, overlaps, and the room to bounds: t minus the overlaps, h, and 1 − h."""

    free: Heights
    bound: float
    h: Heights
    overlaps: Heights
    room: Heights


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

    def fold(self, slopes: Heights) -> Heights:
        """Return [..., n] derivatives as derivatives by the free heights."""
        folded = slopes[..., : self.count - self.tied].copy()
        folded[..., : self.tied] += slopes[..., ::-1][..., : self.tied]
        return folded


def interior_point(
    h: Heights,
    *,
    centre: int | None = None,
    barrier: float = 1e-6,
    steps: int = 250,
    end_s: float = np.inf,
    clock: Clock = time.process_time,
) -> Heights:
    """Minimise the maximum overlap of [n] heights from a start within [0, 1].

    Args:
        centre: number of pieces in the middle that are not tied to their mirror images; None for all. Other pieces
            become the mean of both.
        barrier: first μ; a greater one moves farther from the start.
        steps: maximum number of Newton steps.
        end_s: time by the clock after which no new step starts.
    """
    ties = Mirrored(len(h), len(h) if centre is None else centre)
    free = ties.fold(h) / ties.weights
    best, point = ties.expand(free), _enter(ties, free, barrier)
    multipliers = barrier / point.room
    best_value = float(compute_overlaps(best).max()) if abs(float(best.sum()) - len(h) / 2) < 1e-9 else np.inf
    for _ in range(steps):
        if clock() >= end_s or not np.isfinite(point.bound):
            break
        try:
            step, changes, slope = _newton(ties, point, multipliers, barrier)
        except np.linalg.LinAlgError:
            break
        last, point = point, _walk(ties, point, step, slope, barrier)
        central = barrier / point.room
        multipliers = multipliers + limit_length(multipliers, changes) * changes
        multipliers = np.clip(multipliers, central / _DUAL_RANGE, central * _DUAL_RANGE)
        if (value := float(point.overlaps.max())) < best_value:
            best, best_value = point.h, value
        if point is last or -slope < 40 * barrier * len(h):
            if barrier <= _GAP:
                break
            barrier = max(barrier / 2, _GAP)
    return best


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
    return _Point(free, bound, h, overlaps, np.concatenate([bound - overlaps, free, 1 - free]))


def _newton(
    ties: Mirrored, point: _Point, multipliers: Heights, barrier: float
) -> tuple[tuple[Heights, float], Heights, float]:
    """Return the steps of free heights and t, those of the multipliers, and the derivative of the barrier function."""
    count = len(point.free)
    weights, low, high = np.split(barrier / point.room, [-2 * count, -count])
    gradient, gradient_bound = overlap_gradient(ties, point.h, weights) - low + high, 1 - float(weights.sum())
    scale, low, high = np.split(multipliers / point.room, [-2 * count, -count])
    diagonal = low + high
    rows = np.flatnonzero(scale > _ROW_SHARE * scale.max())
    slopes = compute_slopes(ties, point.h, rows)
    solve = factorise(slopes, scale[rows], diagonal + 1e-9 * float(np.median(diagonal)), ties.weights)
    step, step_bound, _ = solve(-gradient, -gradient_bound, 0.0)
    change = ties.expand(step)
    products = np.correlate(change, 1 - point.h, "full") - np.correlate(point.h, change, "full")
    room_steps = np.concatenate([step_bound - (products * (2 / ties.count))[ties.first :], step, -step])
    changes = (barrier - multipliers * room_steps) / point.room - multipliers
    return (step, step_bound), changes, float(gradient @ step) + gradient_bound * step_bound


def _walk(ties: Mirrored, point: _Point, step: tuple[Heights, float], slope: float, barrier: float) -> _Point:
    """Return the point after a step that lowers the barrier function, or the same point if there is none."""
    length = min(limit_length(point.free, step[0]), limit_length(1 - point.free, -step[0]))
    before = point.bound - barrier * float(np.log(point.room).sum())
    for _ in range(25):
        after = _place(ties, point.free + length * step[0], point.bound + length * step[1])
        if after.room.min() > 0:
            value = after.bound - barrier * float(np.log(after.room).sum())
            if value <= before + 1e-4 * length * slope + 1e-15:
                return after
        length /= 2
    return point


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
        for each in np.array([1 - h, h]) * (2 / ties.count)
    )
    shifts = rows + ties.first
    return ties.fold(ahead[::-1][shifts] - behind[shifts])
