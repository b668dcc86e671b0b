"""Local search for packings of circles in a square, a rectangle or a disc, with NumPy and SciPy only.

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
type Points = NDArray[np.float64]
type Region = Literal["square", "rectangle", "circle"]
"""The unit square; a rectangle [0, w] × [0, 2 − w] of perimeter 4 with any w; or the disc of radius 1 around 0."""

_MIN_GAIN = 1e-12
_MARGIN = 1e-15  # of radii, for rounding
_FIRST_RADIUS = 0.1
_MIN_RADIUS = 1e-7
_GROWTH = 4.0
_MAX_APPROACH = 3.0  # a step reduces the distance of two centres by at most 2√2 times its radius
_COINCIDENT = 1e-12
_TOLERANCE = 1e-10  # smallest value that HiGHS accepts
_ROUGH_GAIN = 1e-6
_PATIENCE = 6  # failed attempts for each circle before a restart


class Container:
    """Region that circles must not leave; a rectangle leaves equal room beside and above them."""

    def __init__(self, region: Region, circles: Circles) -> None:
        self.is_disc, width = region == "circle", 1.0
        if region == "rectangle":
            extent = (circles[:, :2] + circles[:, 2:]).max(axis=0)
            width = float(np.clip(1 + (extent[0] - extent[1]) / 2, 0, 2))
        self.low, self.high = np.full(2, -1.0 if self.is_disc else 0.0), np.array([width, 2 - width])

    def move_inside(self, centres: Points) -> Points:
        """Return the nearest points in the container."""
        if self.is_disc:
            return centres / np.maximum(np.hypot(*centres.T) / (1 - _MARGIN), 1)[:, None]
        return np.clip(centres, self.low, self.high)

    def find_sides(self, centres: Points) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the [4, n, 2] outward normals of four sides around [n, 2] centres, and the [4, n] room up to them.

        The sides of a disc are tangents, one of them at the point that is nearest to the centre.
        """
        angles = np.arctan2(*centres.T[::-1]) if self.is_disc else np.zeros(len(centres))
        ahead = np.column_stack([np.cos(angles), np.sin(angles)])
        across = ahead[:, ::-1] * [-1, 1]
        normals = np.array([-ahead, ahead, -across, across])
        return normals, np.array([-self.low, self.high]).T.reshape(4, 1) - (normals * centres).sum(axis=2)


def fit(circles: Circles, region: Region) -> Circles:
    """Return the centres, moved into the region, with radii as large as the earlier circles in the list allow."""
    container = Container(region, circles)
    centres = container.move_inside(circles[:, :2])
    radii = np.maximum(circles[:, 2], 0)
    distances, sides = compute_distances(centres), container.find_sides(centres)[1].min(axis=0)
    for _ in range(2):  # circles that shrank in the first round may leave room for others
        for place in range(len(radii)):
            room = min(float(sides[place]), float((distances[place] - radii).min()))
            radii[place] = max(room - _MARGIN, 0.0)
    return np.column_stack([centres, radii])


def _polish(construction: Circles, seconds: float, region: Region) -> Circles:
    """Solve a sequence of linear programs over centres and radii.

    The distance of two centres is at least its first-order value, so no circles of a solution overlap. Those that leave
    a disc, whose tangents are outside of it, shrink.

    Args:
        seconds: processor time after which no new program starts.
    """
    circles = np.array(construction, np.float64)
    improved = linear_programs(fit(circles, region), region, end_s=time.process_time() + seconds)
    return improved if improved[:, 2].sum() > circles[:, 2].sum() or not _fits(circles, region) else circles


polish_square = partial(_polish, region="square")
polish_rectangle = partial(_polish, region="rectangle")
polish_circle = partial(_polish, region="circle")


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
    best = current = fit(_scatter(count, rng, region), region)
    stale = 0
    while time.process_time() < end_s:
        is_restart = stale > _PATIENCE * count
        start = _scatter(count, rng, region) if is_restart else _perturb(current, rng, region)
        candidate = linear_programs(start, region, end_s=end_s, min_gain=_ROUGH_GAIN)
        is_improved = candidate[:, 2].sum() > current[:, 2].sum() + _ROUGH_GAIN
        stale = 0 if is_improved or is_restart else stale + 1
        if is_improved or is_restart:
            current = candidate
        if candidate[:, 2].sum() > best[:, 2].sum() + _ROUGH_GAIN:
            best = linear_programs(candidate, region, end_s=end_s)
            on_best(time.process_time() - began_s, best)
    return best


def _scatter(count: int, rng: np.random.Generator, region: Region) -> Circles:
    container = Container(region, np.zeros((1, 3)))
    centres = rng.uniform(container.low, container.high, (count, 2))
    return np.column_stack([container.move_inside(centres), np.zeros(count)])


def _perturb(circles: Circles, rng: np.random.Generator, region: Region) -> Circles:
    """Move a few circles far, or all circles a little. All radii become 0, so that circles grow together."""
    count = len(circles)
    centres, container = circles[:, :2].copy(), Container(region, circles)
    if rng.random() < 0.7:
        few = rng.choice(count, size=min(count, int(rng.integers(1, 4))), replace=False)
        centres[few] = rng.uniform(container.low, container.high, (len(few), 2))
    else:
        centres += rng.normal(0, 10 ** rng.uniform(-2.5, -1), (count, 2))
    return np.column_stack([container.move_inside(centres), np.zeros(count)])


def compute_distances(centres: Points) -> NDArray[np.float64]:
    """Return the [n, n] distances of [n, 2] centres from each other, infinite from themselves."""
    distances = np.hypot(*(centres[:, None] - centres[None]).transpose(2, 0, 1))
    np.fill_diagonal(distances, np.inf)
    return distances


def _directions(differences: Points, first: NDArray[np.int64], second: NDArray[np.int64]) -> Points:
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
    gaps = compute_distances(centres) - (radii[:, None] + radii)
    _, room = Container(region, circles).find_sides(centres)
    return bool(gaps.min() >= 0 and (room >= radii).all())


def _solve_linear_program(circles: Circles, radius: float, region: Region) -> Circles | None:
    """Return the best packing within the radius, with distances to first order; None if the solver fails."""
    from scipy.optimize import linprog  # pyright: ignore[reportUnknownVariableType]  SciPy says little of its types
    from scipy.sparse import coo_array

    count = len(circles)
    centres = circles[:, :2]
    distances = compute_distances(centres)
    max_radii = np.minimum(1, circles[:, 2] + _GROWTH * radius)
    first, second = np.nonzero(np.triu(distances < max_radii[:, None] + max_radii + _MAX_APPROACH * radius, 1))
    differences = centres[first] - centres[second]
    directions = _directions(differences, first, second)
    side_normals, room = Container(region, circles).find_sides(centres)
    # In the variables dx, dy, r and the change dw of a rectangle's width: r_i + r_j ≤ u·(c_i + dc_i − c_j − dc_j) of
    # pairs, and r + normal·dc ≤ room of sides, and this room changes by dw on the right and by −dw above.
    pair_rows, side_rows = np.arange(len(first)), len(first) + np.arange(4 * count)
    rows = np.concatenate([pair_rows, pair_rows, side_rows])
    places = np.concatenate([first, second, np.tile(np.arange(count), 4)])
    normals = np.concatenate([-directions, directions, side_normals.reshape(-1, 2)])
    values = np.concatenate([*normals.T, np.ones(len(rows)), np.repeat([0.0, -1.0, 0.0, 1.0], count)])
    columns = np.concatenate([places, count + places, 2 * count + places, np.full(len(side_rows), 3 * count)])
    table = coo_array((values, (np.concatenate([rows, rows, rows, side_rows]), columns)))
    widening = radius if region == "rectangle" else 0.0
    low = np.concatenate([np.full(2 * count, -radius), np.zeros(count), [-widening]])
    high = np.concatenate([np.full(2 * count, radius), max_radii, [widening]])
    solution = linprog(
        np.concatenate([np.zeros(2 * count), -np.ones(count), [0.0]]),
        A_ub=table.tocsr(),
        b_ub=np.append((directions * differences).sum(axis=1), room),
        bounds=np.column_stack([low, high]),
        method="highs",
        options={"primal_feasibility_tolerance": _TOLERANCE, "dual_feasibility_tolerance": _TOLERANCE},
    )
    if solution.status != 0:
        return None
    steps = cast("NDArray[np.float64]", solution.x)
    moved = centres + steps[: 2 * count].reshape(2, count).T
    return fit(np.column_stack([moved, steps[2 * count : -1]]), region)
