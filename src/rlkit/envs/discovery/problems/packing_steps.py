"""Local search for packings of circles in the unit square, with NumPy and SciPy alone.

It is what a run is compared with, and what programs may call. It imports nothing of rlkit, and can be loaded where
programs run.

Invariant: what is returned keeps all rules and is at least as good as what was given, if that kept them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

type Circles = NDArray[np.float64]
"""[n, 3] x, y and radius."""

_LEAST_GAIN = 1e-12
_MARGIN = 1e-15  # by which radii stay below what rounding leaves room for
_FIRST_RADIUS = 0.1
_LEAST_RADIUS = 1e-7
_GROWTH = 4.0
_NEARER = 3.0  # two centres come nearer by at most 2√2 times the radius of a step
_SAME = 1e-12
_TOLERANCE = 1e-10  # the least that HiGHS takes
_ROUGH_GAIN = 1e-6
_PATIENCE = 6
"""Tries in vain for each circle, before it begins anew."""


def fitted(circles: Circles) -> Circles:
    """The same centres, moved into the square, with radii that fit: as large as those before them in the list leave."""
    centres = np.clip(circles[:, :2], 0, 1)
    radii = np.maximum(circles[:, 2], 0)
    distances = _distances(centres)
    np.fill_diagonal(distances, np.inf)
    sides = np.minimum(centres, 1 - centres).min(axis=1)
    for _ in range(2):  # what the first round has made smaller may leave room
        for place in range(len(radii)):
            room = min(float(sides[place]), float((distances[place] - radii).min(initial=np.inf)))
            radii[place] = max(room - _MARGIN, 0.0)
    return np.column_stack([centres, radii])


def polish(construction: Circles, seconds: float) -> Circles:
    """A sequence of linear programs over centres and radii.

    The distance of two centres is at least what it is to first order, so that a solution of such a program is a packing
    again, and no worse.

    Args:
        seconds: of processor time, after which no new program is begun.
    """
    circles = np.array(construction, np.float64)
    better = linear_programs(fitted(circles), end_s=time.process_time() + seconds)
    return better if better[:, 2].sum() > circles[:, 2].sum() or not _fits(circles) else circles


def linear_programs(circles: Circles, *, end_s: float, least_gain: float = _LEAST_GAIN) -> Circles:
    """As `polish`, for circles that fit, until the processor time of this process is `end_s` or a step gains less."""
    radius = _FIRST_RADIUS
    while time.process_time() < end_s and radius > _LEAST_RADIUS:
        moved = _programmed(circles, radius)
        if moved is None:
            break
        gain = float(moved[:, 2].sum() - circles[:, 2].sum())
        if gain > 0:
            circles = moved
        if gain < least_gain:
            radius /= 10
    return circles


def search(
    seed: int, seconds: float, *, count: int, told: Callable[[float, Circles], None] = lambda seconds, circles: None
) -> Circles:
    """Basin hopping from random beginnings: some circles are put elsewhere, and linear programs do the rest.

    Args:
        seconds: of processor time.
        told: called with the seconds so far and each new best packing.
    """
    rng = np.random.default_rng(seed)
    began_s = time.process_time()
    end_s = began_s + seconds
    best = now = fitted(_scattered(count, rng))
    stale = 0
    while time.process_time() < end_s:
        fresh = stale > _PATIENCE * count
        given = _scattered(count, rng) if fresh else _shaken(now, rng)
        tried = linear_programs(given, end_s=end_s, least_gain=_ROUGH_GAIN)
        gained = tried[:, 2].sum() > now[:, 2].sum() + _ROUGH_GAIN
        stale = 0 if gained or fresh else stale + 1
        if gained or fresh:
            now = tried
        if tried[:, 2].sum() > best[:, 2].sum() + _ROUGH_GAIN:
            best = linear_programs(tried, end_s=end_s)
            told(time.process_time() - began_s, best)
    return best


def _scattered(count: int, rng: np.random.Generator) -> Circles:
    return np.column_stack([rng.uniform(0, 1, (count, 2)), np.zeros(count)])


def _shaken(circles: Circles, rng: np.random.Generator) -> Circles:
    """A few circles elsewhere, or all of them moved a little; all without a radius, so that they grow together."""
    count = len(circles)
    centres = circles[:, :2].copy()
    if rng.random() < 0.7:
        few = rng.choice(count, size=min(count, int(rng.integers(1, 4))), replace=False)
        centres[few] = rng.uniform(0, 1, (len(few), 2))
    else:
        centres += rng.normal(0, 10 ** rng.uniform(-2.5, -1), (count, 2))
    return np.column_stack([np.clip(centres, 0, 1), np.zeros(count)])


def _distances(centres: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.hypot(*(centres[:, None] - centres[None]).transpose(2, 0, 1))


def _directions(apart: NDArray[np.float64], first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.float64]:
    """[p, 2] from the second centre of each pair to the first.

    Circles in one place are parted as if each were at another place of a ring: any direction keeps them apart, but they
    must not contradict each other.
    """
    same = np.hypot(*apart.T) < _SAME
    ring = np.column_stack([np.cos(first) - np.cos(second), np.sin(first) - np.sin(second)])
    along = np.where(same[:, None], ring, apart)
    return along / np.hypot(*along.T)[:, None]


def _fits(circles: Circles) -> bool:
    x, y, radii = circles.T
    if not np.isfinite(circles).all() or radii.min() < 0:
        return False
    gaps = _distances(circles[:, :2]) - (radii[:, None] + radii)
    np.fill_diagonal(gaps, 0)
    return bool(gaps.min() >= 0 and (np.minimum(np.minimum(x, 1 - x), np.minimum(y, 1 - y)) >= radii).all())


def _programmed(circles: Circles, radius: float) -> Circles | None:
    """The packing within the radius whose sum is largest, where distances change to first order."""
    from scipy.optimize import linprog  # pyright: ignore[reportUnknownVariableType]  SciPy says little of its types
    from scipy.sparse import coo_array

    count = len(circles)
    centres = circles[:, :2]
    distances = _distances(centres)
    widest = np.minimum(0.5, circles[:, 2] + _GROWTH * radius)
    first, second = np.nonzero(np.triu(distances < widest[:, None] + widest + _NEARER * radius, 1))
    apart = centres[first] - centres[second]
    ahead = _directions(apart, first, second)
    # In the variables dx, dy and r: r_i + r_j ≤ u·(c_i + dc_i − c_j − dc_j), and r ≤ c + dc, and r ≤ 1 − c − dc.
    pair, own, ones = np.arange(len(first)), np.arange(count), np.ones(count)
    entries = [
        (pair, 2 * count + first, np.ones(len(pair))),
        (pair, 2 * count + second, np.ones(len(pair))),
    ]
    for axis in (0, 1):
        entries += [(pair, axis * count + first, -ahead[:, axis]), (pair, axis * count + second, ahead[:, axis])]
        for side, sign in ((2 * axis, -ones), (2 * axis + 1, ones)):
            row = len(pair) + side * count + own
            entries += [(row, 2 * count + own, ones), (row, axis * count + own, sign)]
    rows, columns, values = (np.concatenate(one) for one in zip(*entries, strict=True))
    table = coo_array((values, (rows, columns)), shape=(len(pair) + 4 * count, 3 * count))
    x, y = centres.T
    low = np.concatenate([np.full(2 * count, -radius), np.zeros(count)])
    high = np.concatenate([np.full(2 * count, radius), widest])
    solved = linprog(
        np.concatenate([np.zeros(2 * count), -np.ones(count)]),
        A_ub=table.tocsr(),
        b_ub=np.concatenate([(ahead * apart).sum(axis=1), x, 1 - x, y, 1 - y]),
        bounds=np.column_stack([low, high]),
        method="highs",
        options={"primal_feasibility_tolerance": _TOLERANCE, "dual_feasibility_tolerance": _TOLERANCE},
    )
    if solved.status != 0:
        return None
    found = cast("NDArray[np.float64]", solved.x)
    return fitted(np.column_stack([centres + found[: 2 * count].reshape(2, count).T, found[2 * count :]]))
