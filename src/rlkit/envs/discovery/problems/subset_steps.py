"""Search for largest subsets without forbidden pairs or triples of points, with NumPy only.

It is a run's baseline, and a helper that programs can call. It does not import rlkit, so that programs can load it.

Invariant: a result is valid if the initial subset is, and at least as large.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

type Points = NDArray[np.float64]
"""[k, d] integer coordinates."""
type CountConflicts = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]
"""For a new member and the other members: the number of forbidden sets with these that each point would complete."""
type Report = Callable[[float, Points], None]

_ignore: Report = lambda seconds, points: None  # noqa: E731  a default of one type
_PATIENCE = 2000  # steps without a larger subset before a restart from a random part of the largest
_MAX_TENURE = 10


def search_subset(
    universe: Points,
    count_conflicts: CountConflicts,
    seconds: float,
    *,
    seed: int = 0,
    start: Points | None = None,
    on_best: Report = _ignore,
) -> Points:
    """Return a large valid subset of the universe, by tabu search.

    Each step adds a point with the fewest conflicts, then removes points until there are none; these cannot return for
    a few steps.

    Args:
        seconds: processor time.
        start: valid subset to begin with; if it is not in the universe, it is returned.
        on_best: called with the elapsed seconds and each new largest subset.
    """
    rng = np.random.default_rng(seed)
    began_s = time.process_time()
    size = len(universe)
    chosen = list[int]()
    conflicts, returns = np.zeros(size, np.int64), np.zeros(size, np.int64)

    def add(point: int) -> None:
        conflicts[:] += count_conflicts(point, np.array(chosen, np.int64))
        chosen.append(point)

    places = {point.tobytes(): place for place, point in enumerate(universe + 0.0)}
    for point in universe[:0] if start is None else start + 0.0:
        if point.tobytes() not in places:
            return np.array(start)
        add(places[point.tobytes()])
    best, step, stale = chosen.copy(), 0, 0
    while time.process_time() < began_s + seconds and len(best) < size:
        step, stale = step + 1, stale + 1
        if stale > _PATIENCE:
            stale, conflicts[:] = 0, 0
            chosen.clear()
            for point in rng.permutation(best)[rng.integers(len(best)) :].tolist():
                add(point)
        costs = np.where(returns > step, 2 * size, conflicts)
        costs[chosen] = 3 * size**2
        add(int(rng.choice(np.flatnonzero(costs == costs.min()))))
        while (worst := conflicts[chosen[:-1]]).max(initial=0) > 0:
            leaving = chosen.pop(int(rng.choice(np.flatnonzero(worst == worst.max()))))
            conflicts -= count_conflicts(leaving, np.array(chosen, np.int64))
            returns[leaving] = step + rng.integers(1, _MAX_TENURE + 1)
        if len(chosen) > len(best):
            best, stale = chosen.copy(), 0
            on_best(time.process_time() - began_s, universe[best])
    return universe[best]


def search_isosceles(seed: int, seconds: float, *, size: int, on_best: Report = _ignore) -> Points:
    """Search for the most cells of a grid of which no three form an isosceles triangle."""
    return search_subset(*_make_grid(size), seconds, seed=seed, on_best=on_best)


def polish_isosceles(construction: Points, seconds: float) -> Points:
    """Search from a construction, in the grid that ends at its largest coordinate."""
    return search_subset(*_make_grid(int(construction.max()) + 1), seconds, start=construction)


def search_kissing(seed: int, seconds: float, *, dimension: int, on_best: Report = _ignore) -> Points:
    """Search for the most vectors of `list_shell` at angles of at least 60°, each with all changes of its signs."""
    shell = list_shell(dimension)
    patterns = np.unique(np.abs(shell), axis=0)

    def expand(chosen: Points) -> Points:
        return shell[(np.abs(shell)[:, None] == chosen).all(axis=2).any(axis=1)]

    def report(elapsed_s: float, chosen: Points) -> None:
        on_best(elapsed_s, expand(chosen))

    return expand(search_subset(patterns, _count_near(patterns), seconds, seed=seed, on_best=report))


def polish_kissing(construction: Points, seconds: float) -> Points:
    """Search among the vectors of `list_shell` from a construction that consists of them."""
    columns = construction.shape[1]
    shell = list_shell(2 if columns == 3 and not construction.sum(axis=1).any() else columns)
    return search_subset(shell, _count_near(shell), seconds, start=construction)


def list_shell(dimension: int) -> Points:
    """Return integer vectors of one length: ±1 at two places below dimension 6, otherwise ±1 at four, and ±2 at one.

    In dimension 2, they are the regular hexagon in a plane in space, since it has no rational corners in the plane.
    """
    weight, columns = (4 if dimension > 5 else 2), max(dimension, 3)
    signs = np.array(list(product((1.0, -1.0), repeat=weight)))
    identity = np.eye(columns)
    blocks = [signs @ identity[list(support)] for support in combinations(range(columns), weight)]
    axes = [2 * identity, -2 * identity] if weight == 4 else []
    shell = np.concatenate([*blocks, *axes])
    return shell if dimension > 2 else shell[shell.sum(axis=1) == 0]


def _count_near(vectors: Points) -> CountConflicts:
    """Return the count of vectors at an angle of less than 60°; all are equally long."""
    limit = float(vectors[0] @ vectors[0]) / 2

    def count(new: int, others: NDArray[np.int64]) -> NDArray[np.int64]:
        counts = (vectors @ vectors[new] > limit).astype(np.int64)
        counts[new] = 0
        return counts

    return count


def _make_grid(size: int) -> tuple[Points, CountConflicts]:
    """Return the cells of a grid, and the count of isosceles triangles, flat ones included."""
    x, y = np.indices((size, size), np.int16).reshape(2, -1)
    distances = (x[:, None] - x) ** 2 + (y[:, None] - y) ** 2
    length = int(distances.max()) + 1

    def count(new: int, others: NDArray[np.int64]) -> NDArray[np.int64]:
        beside = distances[others]
        counts = (beside == distances[new]).sum(axis=0)  # with the apex at each cell of the grid
        counts += (beside == beside[:, [new]]).sum(axis=0)  # at another member
        counts += np.bincount(beside[:, new], minlength=length)[distances[new]]  # at the new one
        counts[others] -= 1  # a triangle that has this cell twice
        counts[new] = 0
        return counts

    return np.column_stack([x, y]).astype(np.float64), count
