"""Local search for packings of circles in a square or a rectangle, with NumPy and SciPy only.

It is a run's baseline, and a helper that programs can call. It does not import rlkit, so that programs can load it.

Invariant: a result is a valid packing. It is at least as good as the initial packing if that is valid.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

type Circles = NDArray[np.float64]
"""[n, 3] x, y and radius."""
type Region = Literal["square", "rectangle"]
"""The unit square, or a rectangle [0, w] × [0, 2 − w] of perimeter 4 with any w."""

_MIN_GAIN = 1e-12
_MARGIN = 1e-15  # of radii, for rounding
_FIRST_RADIUS = 0.1
_MIN_RADIUS = 1e-7
_GROWTH = 4.0
_MAX_APPROACH = 3.0  # a step reduces the distance of two centres by at most 2√2 times its radius
_COINCIDENT = 1e-12
_TOLERANCE = 1e-10  # smallest value that HiGHS accepts
_ROUGH_GAIN = 1e-6
_PATIENCE = 6
"""Failed attempts for each circle before a restart."""


def find_box(circles: Circles, region: Region) -> NDArray[np.float64]:
    """Return [2] width and height of the region; a rectangle's leave equal room beside and above the circles."""
    if region == "square":
        return np.ones(2)
    extent = (circles[:, :2] + circles[:, 2:]).max(axis=0)
    width = np.clip(1 + (extent[0] - extent[1]) / 2, 0, 2)
    return np.array([width, 2 - width])


def fit(circles: Circles, region: Region) -> Circles:
    """Return the centres, moved into the region, with radii as large as the earlier circles in the list allow."""
    box = find_box(circles, region)
    centres = np.clip(circles[:, :2], 0, box)
    radii = np.maximum(circles[:, 2], 0)
    distances = _distances(centres)
    np.fill_diagonal(distances, np.inf)
    sides = np.minimum(centres, box - centres).min(axis=1)
    for _ in range(2):  # circles that shrank in the first round may leave room for others
        for place in range(len(radii)):
            room = min(float(sides[place]), float((distances[place] - radii).min(initial=np.inf)))
            radii[place] = max(room - _MARGIN, 0.0)
    return np.column_stack([centres, radii])


def _polish(construction: Circles, seconds: float, region: Region) -> Circles:
    """Solve a sequence of linear programs over centres and radii.

    The distance of two centres is at least its first-order value, so each solution is a packing, and no worse.

    Args:
        seconds: processor time after which no new program starts.
    """
    circles = np.array(construction, np.float64)
    improved = linear_programs(fit(circles, region), region, end_s=time.process_time() + seconds)
    return improved if improved[:, 2].sum() > circles[:, 2].sum() or not _fits(circles, region) else circles


polish_square = partial(_polish, region="square")
polish_rectangle = partial(_polish, region="rectangle")


def linear_programs(circles: Circles, region: Region, *, end_s: float, min_gain: float = _MIN_GAIN) -> Circles:
    """Improve a valid packing until a step gains too little, or the process reaches the processor time `end_s`."""
    radius = _FIRST_RADIUS
    while time.process_time() < end_s and radius > _MIN_RADIUS:
        candidate = _solve_linear_program(circles, radius, region)
        if candidate is None:
            break
        gain = float(candidate[:, 2].sum() - circles[:, 2].sum())
        if gain > 0:
            circles = candidate
        if gain < min_gain:
            radius /= 10
    return circles


def search(
    seed: int,
    seconds: float,
    *,
    count: int,
    region: Region = "square",
    on_best: Callable[[float, Circles], None] = lambda seconds, circles: None,
) -> Circles:
    """Search by basin hopping from random packings: move some circles, then solve linear programs.

    Args:
        seconds: processor time.
        on_best: called with the elapsed seconds and each new best packing.
    """
    rng = np.random.default_rng(seed)
    began_s = time.process_time()
    end_s = began_s + seconds
    best = current = fit(_scatter(count, rng), region)
    stale = 0
    while time.process_time() < end_s:
        is_restart = stale > _PATIENCE * count
        start = _scatter(count, rng) if is_restart else _perturb(current, rng, find_box(current, region))
        candidate = linear_programs(start, region, end_s=end_s, min_gain=_ROUGH_GAIN)
        is_improved = candidate[:, 2].sum() > current[:, 2].sum() + _ROUGH_GAIN
        stale = 0 if is_improved or is_restart else stale + 1
        if is_improved or is_restart:
            current = candidate
        if candidate[:, 2].sum() > best[:, 2].sum() + _ROUGH_GAIN:
            best = linear_programs(candidate, region, end_s=end_s)
            on_best(time.process_time() - began_s, best)
    return best


def _scatter(count: int, rng: np.random.Generator) -> Circles:
    return np.column_stack([rng.uniform(0, 1, (count, 2)), np.zeros(count)])


def _perturb(circles: Circles, rng: np.random.Generator, box: NDArray[np.float64]) -> Circles:
    """Move a few circles far, or all circles a little. All radii become 0, so that circles grow together."""
    count = len(circles)
    centres = circles[:, :2].copy()
    if rng.random() < 0.7:
        few = rng.choice(count, size=min(count, int(rng.integers(1, 4))), replace=False)
        centres[few] = rng.uniform(0, box, (len(few), 2))
    else:
        centres += rng.normal(0, 10 ** rng.uniform(-2.5, -1), (count, 2))
    return np.column_stack([np.clip(centres, 0, box), np.zeros(count)])


def _distances(centres: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.hypot(*(centres[:, None] - centres[None]).transpose(2, 0, 1))


def _directions(
    differences: NDArray[np.float64], first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return [p, 2] unit vectors from the second centre of each pair to the first.

    Coincident circles get directions as if they lay on a ring. Any consistent set of directions separates them.
    """
    are_coincident = np.hypot(*differences.T) < _COINCIDENT
    ring = np.column_stack([np.cos(first) - np.cos(second), np.sin(first) - np.sin(second)])
    vectors = np.where(are_coincident[:, None], ring, differences)
    return vectors / np.hypot(*vectors.T)[:, None]


def _fits(circles: Circles, region: Region) -> bool:
    centres, radii = circles[:, :2], circles[:, 2]
    if not np.isfinite(circles).all() or radii.min() < 0:
        return False
    gaps = _distances(centres) - (radii[:, None] + radii)
    np.fill_diagonal(gaps, 0)
    sides = np.minimum(centres, find_box(circles, region) - centres).min(axis=1)
    return bool(gaps.min() >= 0 and (sides >= radii).all())


def _solve_linear_program(circles: Circles, radius: float, region: Region) -> Circles | None:
    """Return the best packing within the radius, with distances to first order; None if the solver fails."""
    from scipy.optimize import linprog  # pyright: ignore[reportUnknownVariableType]  SciPy says little of its types
    from scipy.sparse import coo_array

    count = len(circles)
    centres = circles[:, :2]
    distances = _distances(centres)
    max_radii = np.minimum(1, circles[:, 2] + _GROWTH * radius)
    first, second = np.nonzero(np.triu(distances < max_radii[:, None] + max_radii + _MAX_APPROACH * radius, 1))
    differences = centres[first] - centres[second]
    directions = _directions(differences, first, second)
    # In the variables dx, dy, r and the change dw of a rectangle's width w: r_i + r_j ≤ u·(c_i + dc_i − c_j − dc_j),
    # and r ≤ c + dc, and r ≤ w + dw − x − dx, and r ≤ h − dw − y − dy.
    pair, circle, ones = np.arange(len(first)), np.arange(count), np.ones(count)
    entries = [
        (pair, 2 * count + first, np.ones(len(pair))),
        (pair, 2 * count + second, np.ones(len(pair))),
    ]
    for axis in (0, 1):
        entries += [
            (pair, axis * count + first, -directions[:, axis]),
            (pair, axis * count + second, directions[:, axis]),
        ]
        for side, sign in ((2 * axis, -ones), (2 * axis + 1, ones)):
            row = len(pair) + side * count + circle
            entries += [(row, 2 * count + circle, ones), (row, axis * count + circle, sign)]
        entries.append((row, np.full(count, 3 * count), ones if axis else -ones))
    rows, columns, values = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    table = coo_array((values, (rows, columns)), shape=(len(pair) + 4 * count, 3 * count + 1))
    x, y = centres.T
    width, height = find_box(circles, region)
    widening = 0.0 if region == "square" else radius
    low = np.concatenate([np.full(2 * count, -radius), np.zeros(count), [-widening]])
    high = np.concatenate([np.full(2 * count, radius), max_radii, [widening]])
    solution = linprog(
        np.concatenate([np.zeros(2 * count), -np.ones(count), [0.0]]),
        A_ub=table.tocsr(),
        b_ub=np.concatenate([(directions * differences).sum(axis=1), x, width - x, y, height - y]),
        bounds=np.column_stack([low, high]),
        method="highs",
        options={"primal_feasibility_tolerance": _TOLERANCE, "dual_feasibility_tolerance": _TOLERANCE},
    )
    if solution.status != 0:
        return None
    steps = cast("NDArray[np.float64]", solution.x)
    moved = centres + steps[: 2 * count].reshape(2, count).T
    return fit(np.column_stack([moved, steps[2 * count : -1]]), region)
