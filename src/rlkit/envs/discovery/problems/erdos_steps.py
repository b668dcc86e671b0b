"""Search for Erdős' minimum overlap, with NumPy and SciPy only.

It is a run's baseline, and a helper that programs can call: interior-point descent, a sequence of linear programs, and
basin hopping. Programs can load it with `erdos_interior`.

Invariant: a result is a valid construction that is at least as good as the initial construction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np

from rlkit.envs.discovery.problems.erdos_interior import (
    Clock,
    Heights,
    Mirrored,
    compute_overlaps,
    compute_slopes,
    interior_point,
)
from rlkit.envs.discovery.problems.minimax import minimise_maximum

type OnBest = Callable[[float, Heights], None]
type Seed = tuple[int, int]
type Map = Callable[[Callable[[Seed], Sequence[Heights]], Sequence[Seed]], Iterable[Sequence[Heights]]]
"""Function such as `map`, that may call the other function in other processes."""

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
_START_STEPS = 40  # many rough starts find better minima than few exact ones
_START_BARRIER = 1e-4
_HOP_STEPS = 60  # many short descents find more than few that end
_SHIFT_TOLERANCE = 1e-300  # as exact as floats are
_SUM_TOLERANCE = 1e-14  # per piece; above it the verifier rescales heights, possibly beyond 1
_MIN_DISTANCE = 0.004
_BASIN_DISTANCE = 0.03  # of functions of different islands, which differ by 0.05 to 0.2
_MIN_NEW_DISTANCE = 0.0005


def c5(h: Heights) -> float:
    """Return the maximum overlap of [n] heights that sum to n/2."""
    return float(np.correlate(h, 1 - h, mode="full").max()) * 2 / len(h)


def balance(h: Heights) -> Heights:
    """Shift and clip [n] heights so that they lie in [0, 1] and sum to n/2."""
    from scipy.optimize import brentq  # pyright: ignore[reportUnknownVariableType]  SciPy says little of its types

    count = len(h)
    if abs(float(h.sum()) - count / 2) < _SUM_TOLERANCE * count and h.min() >= 0 and h.max() <= 1:
        return h

    def compute_excess(shift: float) -> float:
        return float(np.clip(h + shift, 0, 1).sum()) - count / 2

    ends = -float(h.max()), 1 - float(h.min())
    return np.clip(h + cast("float", brentq(compute_excess, *ends, xtol=_SHIFT_TOLERANCE)), 0, 1)


def polish(construction: Heights, seconds: float, *, clock: Clock = time.process_time) -> Heights:
    """Descend by interior points, then by linear programs, each with the overlaps to first order.

    Args:
        construction: [n] heights; they are rescaled to the sum n/2 if all then lie in [0, 1].
        seconds: time by the clock after which no new step starts.
    """
    end_s = clock() + seconds
    h = np.asarray(construction, np.float64)
    rescaled = h * (len(h) / 2 / float(h.sum())) if h.sum() > 0 else h
    h = balance(rescaled if rescaled.min() >= 0 and rescaled.max() <= 1 else h)
    symmetric = bool(np.abs(h - h[::-1]).max() < 1e-9)
    for barrier in (1e-6, 1e-7, 1e-8):
        centre = 0 if symmetric else None
        candidate = balance(interior_point(h, centre=centre, barrier=barrier, end_s=end_s, clock=clock))
        h = min(h, candidate, key=c5)
    return linear_programs(h, end_s=end_s, symmetric=symmetric, radius=_POLISH_RADIUS, clock=clock)


def linear_programs(
    h: Heights, *, end_s: float, symmetric: bool, radius: float = _FIRST_RADIUS, clock: Clock = time.process_time
) -> Heights:
    """Solve linear programs until there is no gain, or the clock reaches `end_s`."""
    h = balance(h)
    value = c5(h)
    stale = 0
    while clock() < end_s and radius >= _MIN_RADIUS and stale < 3:
        step, expected_value = _solve_linear_program(h, value, radius, symmetric=symmetric)
        candidate = balance(np.clip(h + step, 0, 1))
        gain, expected_gain = value - c5(candidate), value - expected_value
        if gain > 0:
            stale = stale + 1 if gain < _MIN_GAIN else 0
            h, value = candidate, value - gain
            radius *= 2 if gain > 0.7 * expected_gain else 1 if gain > 0.3 * expected_gain else 0.5
        else:
            radius /= 4
    return h


@dataclass(slots=True)
class _Process:
    """Process of a search, which reports each construction that is better than its earlier ones."""

    rng: np.random.Generator
    clock: Clock
    on_best: OnBest | None
    began_s: float
    best: float = np.inf  # value of the best construction

    def report(self, h: Heights) -> None:
        if (value := c5(h)) < self.best:
            self.best = value
            elapsed_s = self.clock() - self.began_s
            if self.on_best is not None:
                self.on_best(elapsed_s, h)


@dataclass(slots=True)
class _Pool:
    """Best constructions of a search, best first; of two with a smaller mean difference, only the better is kept."""

    process: _Process
    min_distance: float = _MIN_DISTANCE
    members: list[Heights] = field(default_factory=list[Heights])

    def add(self, h: Heights) -> None:
        """Report a construction, and keep it if it is good enough."""
        h = balance(h)
        self.process.report(h)
        distinct = list[Heights]()
        for member in sorted([*self.members, h], key=c5):
            if all(_compare(member, other) > self.min_distance for other in distinct):
                distinct.append(member)
        self.members = distinct[:_POOL_SIZE]

    def hop(self, *, centre: int, end_s: float) -> None:
        """Change members and descend, until the clock reaches `end_s`."""
        while self.process.clock() < end_s:
            barrier = 10 ** self.process.rng.uniform(-7.5, -5.5)
            changed = _move(self.members, self.process.rng, centre)
            self.add(interior_point(changed, centre=centre, barrier=barrier, steps=_HOP_STEPS))

    def halve(self, end_s: float) -> _Pool:
        """Search from the members, with two pieces for each of theirs."""
        finer = _Pool(self.process, self.min_distance)
        for h in self.members:
            if not finer.members or self.process.clock() < end_s:
                finer.add(interior_point(h.repeat(2), steps=_HOP_STEPS))
        finer.hop(centre=len(finer.members[0]) // 4, end_s=end_s)
        return finer


def search(
    seed: int,
    seconds: float,
    *,
    pieces: int | None = None,
    starts: Sequence[Heights] = (),
    on_best: OnBest | None = None,
    clock: Clock = time.process_time,
    processes: int = 1,
    run: Map = map,
) -> Heights:
    """Search by basin hopping, from coarse step functions to fine ones: each level halves the pieces of its best.

    Descents on few pieces are fast, and good coarse functions lead to good fine ones. The first two levels are repeated
    in islands that start at random. All processes continue from the best of all islands.

    Args:
        seconds: time of each process by the clock.
        pieces: number of pieces of the last level, by default 512 or that of the starts; each level before has half as
            many, rounded down.
        starts: constructions with equal numbers of pieces to start from, instead of islands.
        on_best: called in a process with the elapsed seconds and each function that is better than its earlier ones.
        clock: returns the processor seconds of its process; one that counts its calls makes a search repeatable.
        run: calls a function for each process, such as `map` of a `ProcessPoolExecutor` or of Ray's `Pool`.
    """
    count = pieces or (len(starts[0]) if starts else _PIECES)
    islands_s = 0.0 if starts else seconds * _HOP_SHARE * (_ISLANDS_SHARE if count >= 4 * _COARSE_PIECES else 1)
    plan = _Plan(count, seconds, islands_s, _MIN_NEW_DISTANCE if starts else _BASIN_DISTANCE, on_best, clock)
    seeds = [(seed, number) for number in range(processes)]
    if not starts:
        starts = sorted((h for members in run(plan.search_islands, seeds) for h in members), key=c5)
    return min((h for members in run(partial(plan.refine, starts), seeds) for h in members), key=c5)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Search in several processes."""

    pieces: int  # number of pieces of the last level
    seconds: float  # time of each process
    islands_s: float  # part of this time for islands
    min_distance: float  # smallest mean difference of functions after the islands
    on_best: OnBest | None
    clock: Clock

    def search_islands(self, seed: Seed) -> Sequence[Heights]:
        """Return the best functions of islands that start at random, with the pieces of the second level."""
        process = _Process(np.random.default_rng(seed), self.clock, self.on_best, self.clock())
        began_s = self.clock()
        halvings = max(0, int(np.log2(self.pieces / _COARSE_PIECES)))
        coarse, islands = self.pieces >> halvings, max(1, round(self.islands_s / _ISLAND_S))
        island_s = self.islands_s / islands
        best = _Pool(process, _BASIN_DISTANCE)
        for number in range(islands):
            island = _Pool(process)
            starts_s, coarse_s, last_s = (began_s + island_s * (number + share) for share in _ISLAND_ENDS)
            while not island.members or self.clock() < starts_s:
                h = process.rng.uniform(0.02, 0.98, coarse)
                island.add(interior_point(h, barrier=_START_BARRIER, steps=_START_STEPS))
            island.hop(centre=coarse, end_s=coarse_s if halvings else last_s)
            for h in (island.halve(last_s) if halvings else island).members[:2]:
                best.add(h)
        return best.members

    def refine(self, starts: Sequence[Heights], seed: Seed) -> Sequence[Heights]:
        """Search from functions after the islands, on increasingly fine levels."""
        began_s, best = self.clock() - self.islands_s, c5(balance(starts[0]))
        process = _Process(np.random.default_rng((*seed, 1)), self.clock, self.on_best, began_s, best)
        end_s = self.clock() + self.seconds - self.islands_s
        hops_end_s = end_s - (1 - _HOP_SHARE) * self.seconds
        pool = _Pool(process, self.min_distance)
        for start in starts:
            pool.add(start)
        halvings = max(0, int(np.log2(self.pieces / len(starts[0]))))
        if not halvings:
            pool.hop(centre=len(starts[0]) // 4, end_s=hops_end_s)
        for level_end_s in np.linspace(self.clock(), hops_end_s, halvings + 1)[1:]:
            pool = pool.halve(level_end_s)
        final = polish(pool.members[0], end_s - self.clock(), clock=self.clock)
        process.report(final)
        return [final]


def _compare(h: Heights, other: Heights) -> float:
    """Return the smallest mean difference of functions, over images of one with the same overlaps."""
    return min(float(np.abs(h - image).mean()) for image in (other, other[::-1], 1 - other, 1 - other[::-1]))


def _move(pool: Sequence[Heights], rng: np.random.Generator, centre: int) -> Heights:
    """Return a member of the pool with a changed segment; pieces outside of the centre keep their mirror images."""
    h = pool[int(len(pool) * rng.random() ** 2)]
    other = pool[int(rng.integers(len(pool)))]
    end = (len(h) + centre + 1) // 2
    width = min(2 + int(end * 10 ** rng.uniform(-1.7, -0.2)), end)
    first = int(rng.integers(end - width + 1))
    segment, place = h[first : first + width], np.arange(width)
    match int(rng.integers(6)):
        case 0:
            changed = segment + rng.normal(0, 10 ** rng.uniform(-2.5, -0.3), width)
        case 1:
            changed = np.roll(segment, int(rng.integers(1, 5)) * (1 if rng.random() < 0.5 else -1))
        case 2:
            changed = np.convolve(np.pad(segment, 3, mode="edge"), np.full(7, 1 / 7), mode="valid")
        case 3:
            changed = segment + rng.random() * (other[first : first + width] - segment)
        case 4:
            changed = h[::-1][first : first + width]
        case _:
            changed = np.interp((place - width / 2) * (1 + rng.normal(0, 0.05)) + width / 2, place, segment)
    h = h.copy()
    h[first : first + width] = np.clip(changed, 0, 1)
    tied = (len(h) - centre) // 2
    h[len(h) - tied :] = h[:tied][::-1]
    return h


def _solve_linear_program(h: Heights, value: float, radius: float, *, symmetric: bool) -> tuple[Heights, float]:
    """Return the step within the radius with the smallest maximum overlap to first order, and that overlap."""
    count = len(h)
    ties = Mirrored(count, 0 if symmetric else count)
    overlap = compute_overlaps(h)[ties.first :]
    # A step changes an overlap by at most 2 · radius · 2 (each height counts twice), and usually by much less.
    rows = np.flatnonzero(overlap > value - min(8 * radius, 1.0))
    free = h[: len(ties.weights)]
    # Scaled by the radius; otherwise the solver's tolerance would be as large as the step.
    change, bound = minimise_maximum(
        compute_slopes(ties, h, rows),
        (value - overlap[rows]) / radius,
        np.maximum(-1, -free / radius),
        np.minimum(1, (1 - free) / radius),
        weights=ties.weights,
        total=(count / 2 - float(h.sum())) / radius,
    )
    return ties.expand(change * radius), value + bound * radius
