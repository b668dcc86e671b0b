"""Search for Erdős' minimum overlap, with NumPy and SciPy only.

It is a run's baseline, and a helper that programs can call: descent with a smoothed maximum, interior-point descent, a
sequence of linear programs, and basin hopping. Programs can load it with `erdos_interior`.

Invariant: a result is a valid construction that is at least as good as the initial construction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from rlkit.envs.discovery.problems.erdos_interior import (
    Heights,
    Mirrored,
    compute_gradient,
    compute_overlaps,
    compute_slopes,
    interior_point,
)

_MIN_RADIUS = 1e-10
_MIN_GAIN = 1e-13
_FIRST_RADIUS = 0.02
_POOL_SIZE = 8
_POLISH_RADIUS = 1e-5
_PIECES = 512
_COARSE_PIECES = 48  # of the first level, or up to twice as many
_ISLANDS_SHARE = 0.6  # of a search, for its islands
_ISLAND_S = 90.0  # after a minute and a half, all members of an island lie in one basin
_ISLAND_ENDS = (0.08, 0.33, 1.0)  # shares of an island's time: random starts, coarse pieces, halved pieces
_HOP_SHARE = 0.95
_HOP_STEPS = 60  # many short descents find more than few that end
_SUM_TOLERANCE = 1e-14  # per piece; above it the verifier rescales heights, possibly beyond 1
_BISECTIONS = 80
_MIN_DISTANCE = 0.004
_MIN_NEW_DISTANCE = 0.0005


def c5(h: Heights) -> float:
    """Return the maximum overlap of [n] heights that sum to n/2."""
    return float(np.correlate(h, 1 - h, mode="full").max()) * 2 / len(h)


def balance(h: Heights) -> Heights:
    """Shift and clip [n] heights so that they lie in [0, 1] and sum to n/2."""
    count = len(h)
    if abs(float(h.sum()) - count / 2) < _SUM_TOLERANCE * count and h.min() >= 0 and h.max() <= 1:
        return h
    low, high = -1.0 - float(h.max()), 1.0 - float(h.min())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if float(np.clip(h + middle, 0, 1).sum()) < count / 2:
            low = middle
        else:
            high = middle
    return np.clip(h + high, 0, 1)


def mirror(h: Heights) -> Heights:
    """Return the mean of [n] heights and their mirror image."""
    return (h + h[::-1]) / 2


def descend(h: Heights, *, iterations: int, symmetric: bool, rate: float = 0.05) -> Heights:
    """Minimise an increasingly steep log-sum-exp of all overlaps with Adam.

    The heights are σ(θ + b), where b makes them sum to n/2.
    """
    count = len(h)
    theta = np.log(np.clip(h, 1e-4, 1 - 1e-4) / (1 - np.clip(h, 1e-4, 1 - 1e-4)))
    mean, spread = np.zeros(count), np.zeros(count)
    theta, best = _centre(theta)
    best_value = c5(best)
    for step in range(1, iterations + 1):
        theta, heights = _centre(theta)
        overlap = compute_overlaps(heights)
        top = float(overlap.max())
        if top < best_value:
            best, best_value = heights, top
        share = step / iterations
        weights = np.exp((overlap - top) * 10 ** (2.0 + 3.0 * share))
        gradient = compute_gradient(heights, weights / weights.sum())
        slope = heights * (1 - heights)
        gradient = slope * (gradient - float(gradient @ slope) / float(slope.sum()))
        if symmetric:
            gradient = mirror(gradient)
        mean = 0.9 * mean + 0.1 * gradient
        spread = 0.99 * spread + 0.01 * gradient * gradient
        step_size = rate * (1 - 0.95 * share)
        theta -= step_size * (mean / (1 - 0.9**step)) / (np.sqrt(spread / (1 - 0.99**step)) + 1e-12)
        theta = np.clip(theta, -16, 16)
    return best


def polish(construction: Heights, seconds: float) -> Heights:
    """Descend by interior points, then by linear programs, each with the overlaps to first order.

    Args:
        construction: [n] heights; they are rescaled to the sum n/2 if all then lie in [0, 1].
        seconds: processor time after which no new step starts.
    """
    end_s = time.process_time() + seconds
    h = np.asarray(construction, np.float64)
    rescaled = h * (len(h) / 2 / float(h.sum())) if h.sum() > 0 else h
    h = balance(rescaled if rescaled.min() >= 0 and rescaled.max() <= 1 else h)
    symmetric = bool(np.abs(h - h[::-1]).max() < 1e-9)
    for barrier in (1e-6, 1e-7, 1e-8):
        candidate = balance(interior_point(h, centre=0 if symmetric else None, barrier=barrier, end_s=end_s))
        h = min(h, candidate, key=c5)
    return linear_programs(h, end_s=end_s, symmetric=symmetric, radius=_POLISH_RADIUS)


def linear_programs(
    h: Heights, *, end_s: float, symmetric: bool, radius: float = _FIRST_RADIUS, max_programs: int = 10_000
) -> Heights:
    """Solve linear programs until there is no gain, or the process reaches the processor time `end_s`."""
    h = balance(h)
    value = c5(h)
    stale = 0
    for _ in range(max_programs):
        if time.process_time() >= end_s or radius < _MIN_RADIUS or stale >= 3:
            break
        step = _solve_linear_program(h, value, radius, symmetric=symmetric)
        if step is None:
            radius /= 4
            continue
        candidate = balance(np.clip(h + step[0], 0, 1))
        gain, expected_gain = value - c5(candidate), value - step[1]
        if gain > 0:
            stale = stale + 1 if gain < _MIN_GAIN else 0
            h, value = candidate, value - gain
            radius *= 2 if gain > 0.7 * expected_gain else 1 if gain > 0.3 * expected_gain else 0.5
        else:
            radius /= 4
    return h


class _Pool:
    """Best distinct constructions of a search, best first.

    Args:
        min_distance: smallest mean difference of two members; of closer ones only the better is kept.
    """

    def __init__(self, rng: np.random.Generator, min_distance: float, on_best: Callable[[Heights], None]) -> None:
        self.members = list[tuple[float, Heights]]()
        self._rng, self._min_distance, self._on_best = rng, min_distance, on_best

    def add(self, h: Heights) -> None:
        """Add a construction if it is good enough."""
        h = balance(h)
        value = c5(h)
        if not self.members or value < self.members[0][0]:
            self._on_best(h)
        distinct = list[tuple[float, Heights]]()
        for member in sorted([*self.members, (value, h)], key=lambda item: item[0]):
            if all(_compare(member[1], other) > self._min_distance for _, other in distinct):
                distinct.append(member)
        self.members = distinct[:_POOL_SIZE]

    def hop(self, *, centre: int, end_s: float) -> None:
        """Change members and descend, until the process reaches the processor time `end_s`."""
        while time.process_time() < end_s:
            barrier = 10 ** self._rng.uniform(-7.5, -5.5)
            changed = _move(self.members, self._rng, centre)
            self.add(interior_point(changed, centre=centre, barrier=barrier, steps=_HOP_STEPS, end_s=end_s))


def search(
    seed: int,
    seconds: float,
    *,
    pieces: int = _PIECES,
    starts: Sequence[Heights] = (),
    on_best: Callable[[float, Heights], None] = lambda seconds, h: None,
) -> Heights:
    """Search by basin hopping, from coarse step functions to fine ones: each level halves the pieces of its best.

    Descents on few pieces are fast, and good coarse functions lead to good fine ones. The first two levels are repeated
    in islands that start at random.

    Args:
        seconds: processor time.
        pieces: number of pieces of the last level, without `starts`; each level before has half as many, rounded down.
        starts: constructions with equal numbers of pieces to start from, as the only level.
        on_best: called with the elapsed seconds and each new best function.
    """
    rng = np.random.default_rng(seed)
    began_s = time.process_time()
    best = np.inf

    def report(h: Heights) -> None:
        nonlocal best
        if (value := c5(h)) < best:
            best = value
            on_best(time.process_time() - began_s, h)

    pool = _Pool(rng, _MIN_NEW_DISTANCE if starts else _MIN_DISTANCE, report)
    for start in starts:
        pool.add(start)
    end_s = began_s + seconds * _HOP_SHARE
    if starts:
        pool.hop(centre=len(starts[0]) // 4, end_s=end_s)
    else:
        halvings = max(0, int(np.log2(pieces / _COARSE_PIECES)))
        ends_s = began_s + (end_s - began_s) * np.linspace(_ISLANDS_SHARE if halvings > 1 else 1, 1, max(halvings, 1))
        pool = _search_islands(rng, pieces >> halvings, ends_s[0], report, is_halved=halvings > 0)
        for level_end_s in ends_s[1:]:
            pool = _halve(pool, rng, level_end_s, report)
    final = polish(pool.members[0][1], began_s + seconds - time.process_time())
    report(final)
    return final


def _search_islands(
    rng: np.random.Generator, pieces: int, end_s: float, report: Callable[[Heights], None], *, is_halved: bool
) -> _Pool:
    """Search from random starts, in islands of their own, and return a pool with the best two of each.

    Args:
        is_halved: whether an island ends with functions of twice as many pieces.
    """
    pool, began_s = _Pool(rng, _MIN_DISTANCE, report), time.process_time()
    islands = max(1, round((end_s - began_s) / _ISLAND_S))
    for number in range(islands):
        island, island_s = _Pool(rng, _MIN_DISTANCE, report), (end_s - began_s) / islands
        starts_s, coarse_s, last_s = (began_s + island_s * (number + share) for share in _ISLAND_ENDS)
        while not island.members or time.process_time() < starts_s:
            h = descend(rng.uniform(0.02, 0.98, pieces), iterations=1000, symmetric=False)
            island.add(interior_point(h, steps=_HOP_STEPS, end_s=end_s))
        island.hop(centre=pieces, end_s=coarse_s if is_halved else last_s)
        for _, h in (_halve(island, rng, last_s, report) if is_halved else island).members[:2]:
            pool.add(h)
    return pool


def _halve(coarse: _Pool, rng: np.random.Generator, end_s: float, report: Callable[[Heights], None]) -> _Pool:
    """Search from the members of a pool, with two pieces for each of theirs."""
    pool = _Pool(rng, _MIN_DISTANCE, report)
    for _, h in coarse.members:
        pool.add(interior_point(h.repeat(2), steps=_HOP_STEPS, end_s=end_s))
    pool.hop(centre=len(pool.members[0][1]), end_s=end_s)
    return pool


def _compare(h: Heights, other: Heights) -> float:
    """Return the smallest mean difference of functions, over images of one with the same overlaps."""
    images = (other, other[::-1], 1 - other, 1 - other[::-1])
    return min(float(np.abs(h - image).mean()) for image in images)


def _move(pool: Sequence[tuple[float, Heights]], rng: np.random.Generator, centre: int) -> Heights:
    """Return a member of the pool with a changed segment; pieces outside of the centre keep their mirror images."""
    h = pool[int(len(pool) * rng.random() ** 2)][1]
    other = pool[int(rng.integers(len(pool)))][1]
    end = (len(h) + centre + 1) // 2
    width = min(2 + int(end * 10 ** rng.uniform(-1.7, -0.2)), end)
    first = int(rng.integers(end - width + 1))
    segment, place = h[first : first + width], np.arange(width)
    match int(rng.integers(8)):
        case 0:
            changed = segment + rng.normal(0, 10 ** rng.uniform(-2.5, -0.3), width)
        case 1:
            changed = np.roll(segment, int(rng.integers(1, 5)) * (1 if rng.random() < 0.5 else -1))
        case 2:
            changed = segment[::-1]
        case 3:
            changed = np.convolve(np.pad(segment, 3, mode="edge"), np.full(7, 1 / 7), mode="valid")
        case 4:
            changed = segment + rng.random() * (other[first : first + width] - segment)
        case 5:
            changed = h[::-1][first : first + width]
        case 6:
            source = int(rng.integers(end - width + 1))
            changed = h[source : source + width]
        case _:
            changed = np.interp((place - width / 2) * (1 + rng.normal(0, 0.05)) + width / 2, place, segment)
    h = h.copy()
    h[first : first + width] = np.clip(changed, 0, 1)
    tied = (len(h) - centre) // 2
    h[len(h) - tied :] = h[:tied][::-1]
    return h


def _centre(theta: Heights) -> tuple[Heights, Heights]:
    """Return θ, shifted so that its n sigmoids sum to n/2, and the sigmoids."""
    for _ in range(3):
        h = 1 / (1 + np.exp(-theta))
        theta = theta - (float(h.sum()) - len(h) / 2) / max(float((h * (1 - h)).sum()), 1e-9)
    h = 1 / (1 + np.exp(-theta))
    return theta, h * (len(h) / 2 / float(h.sum()))


def _solve_linear_program(h: Heights, value: float, radius: float, *, symmetric: bool) -> tuple[Heights, float] | None:
    """Return the step within the radius with the smallest maximum overlap to first order, and that overlap."""
    from scipy.optimize import linprog  # pyright: ignore[reportUnknownVariableType]  SciPy says little of its types

    count = len(h)
    ties = Mirrored(count, 0 if symmetric else count)
    overlap = compute_overlaps(h)
    # A step changes an overlap by at most 2 · radius · 2 (each height counts twice), and usually by much less.
    near = overlap > value - min(8 * radius, 1.0)
    if symmetric:
        near[: count - 1] = False  # equal to those at the opposite shifts
    rows = np.flatnonzero(near)
    slopes = compute_slopes(ties, h, rows - ties.first)
    free = h[: len(ties.weights)]
    low, high = np.maximum(-radius, -free), np.minimum(radius, 1 - free)
    # Scaled by the radius; otherwise the solver's tolerances would be as large as the step.
    solution = linprog(
        np.append(np.zeros(len(free)), 1.0),
        A_ub=np.column_stack([slopes, -np.ones(len(rows))]),
        b_ub=(value - overlap[rows]) / radius,
        A_eq=np.append(ties.weights, 0.0)[None],
        b_eq=[(count / 2 - float(h.sum())) / radius],
        bounds=np.column_stack([np.append(low / radius, -np.inf), np.append(high / radius, np.inf)]),
        method="highs-ds" if len(free) < 150 else "highs-ipm",
    )
    if solution.status != 0:
        return None
    change = cast("Heights", solution.x) * radius
    return ties.expand(change[:-1]), value + float(change[-1])
