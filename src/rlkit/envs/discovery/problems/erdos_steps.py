"""Local search for Erdős' minimum overlap, with NumPy and SciPy only.

It is a run's baseline, and a helper that programs can call: descent with a smoothed maximum, a sequence of linear
programs, basin hopping, and finer grids. It does not import rlkit, so that programs can load it.

Invariant: a result is a valid construction that is at least as good as the initial construction.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

type Heights = NDArray[np.float64]

_MIN_RADIUS = 1e-10
_MIN_GAIN = 1e-13
_FIRST_RADIUS = 0.02
_POOL_SIZE = 6
_SUM_TOLERANCE = 1e-14  # per piece; above it the verifier rescales heights, possibly beyond 1
_BISECTIONS = 80
_MIN_DISTANCE = 0.01


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
        overlap = np.correlate(heights, 1 - heights, mode="full") * (2 / count)
        top = float(overlap.max())
        if top < best_value:
            best, best_value = heights, top
        share = step / iterations
        weights = np.exp((overlap - top) * 10 ** (2.0 + 3.0 * share))
        gradient = _gradient(heights, weights / weights.sum())
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
    """Solve a sequence of linear programs, each with the overlaps to first order within a trust region.

    Args:
        construction: [n] heights; they are rescaled to the sum n/2 if all then lie in [0, 1].
        seconds: processor time after which no new program starts.
    """
    h = np.asarray(construction, np.float64)
    rescaled = h * (len(h) / 2 / float(h.sum())) if h.sum() > 0 else h
    h = rescaled if rescaled.min() >= 0 and rescaled.max() <= 1 else h
    symmetric = bool(np.abs(h - h[::-1]).max() < 1e-9)
    return linear_programs(h, end_s=time.process_time() + seconds, symmetric=symmetric)


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


def search(
    seed: int,
    seconds: float,
    *,
    start: int = 60,
    rungs: tuple[int, ...] = (2, 2, 2),
    on_best: Callable[[float, Heights], None] = lambda seconds, h: None,
) -> Heights:
    """Search by basin hopping over symmetric step functions, on increasingly fine grids.

    Args:
        seconds: processor time.
        start: initial number of pieces.
        rungs: factor of the number of pieces at each refinement.
        on_best: called with the elapsed seconds and each new best function.
    """
    rng = np.random.default_rng(seed)
    began_s = time.process_time()
    share = (0.12, 0.4, 0.75, 1.0)
    pool = list[tuple[float, Heights]]()
    best = np.inf
    for rung in range(len(rungs) + 1):
        end_s = began_s + seconds * share[min(rung + 4 - len(rungs) - 1, 3)]
        if rung:
            pool = [(value, np.repeat(h, rungs[rung - 1])) for value, h in pool[: max(2, _POOL_SIZE - 2 * rung)]]
            pool = [
                (c5(h), h) for h in (linear_programs(h, end_s=end_s, symmetric=True, radius=0.01) for _, h in pool[:1])
            ] + pool[1:]
        while time.process_time() < end_s:
            count = len(pool[0][1]) if pool else start
            if len(pool) < _POOL_SIZE and not rung:
                h = mirror(np.clip(0.5 + rng.uniform(-0.4, 0.4, count), 0, 1))
                h = descend(h, iterations=1500, symmetric=True)
            else:
                h = pool[int(rng.integers(len(pool)) * rng.random())][1]
                if rng.random() < 0.3:
                    h = _cross(h, pool[int(rng.integers(len(pool)))][1], rng)
                h = descend(_perturb(h, rng), iterations=400, symmetric=True, rate=0.03)
            h = linear_programs(h, end_s=end_s, symmetric=True, max_programs=60 if rung == 0 else 40)
            value = c5(h)  # meaningful only for heights that sum to n/2
            pool = _add_to_pool(pool, value, h)
            if value < best:
                best = value
                on_best(time.process_time() - began_s, h)
    return pool[0][1]


def _centre(theta: Heights) -> tuple[Heights, Heights]:
    """Return θ, shifted so that its n sigmoids sum to n/2, and the sigmoids."""
    for _ in range(3):
        h = 1 / (1 + np.exp(-theta))
        theta = theta - (float(h.sum()) - len(h) / 2) / max(float((h * (1 - h)).sum()), 1e-9)
    h = 1 / (1 + np.exp(-theta))
    return theta, h * (len(h) / 2 / float(h.sum()))


def _gradient(h: Heights, weights: Heights) -> Heights:
    """Return [n] Σ_m w_m ∂O_m/∂h_j for the overlaps O_m at the [2n − 1] shifts."""
    ahead = np.convolve(weights, 1 - h, mode="valid")
    behind = np.correlate(weights, h, mode="valid")[::-1]
    return (ahead - behind) * (2 / len(h))


def _perturb(h: Heights, rng: np.random.Generator) -> Heights:
    count = len(h)
    scale = 10 ** rng.uniform(-2.0, -0.5)
    noise = rng.normal(0, scale, count)
    if rng.random() < 0.5:  # only within a window
        place, width = rng.integers(count), max(2, int(count * rng.uniform(0.05, 0.4)))
        noise *= np.abs((np.arange(count) - place + count // 2) % count - count // 2) < width
    return np.clip(mirror(h + noise), 0, 1)


def _cross(h: Heights, other: Heights, rng: np.random.Generator) -> Heights:
    """Return `h` inside a random window around the middle, and `other` outside."""
    count = len(h)
    distance = np.abs(np.arange(count) - (count - 1) / 2) / count
    return np.where(distance < rng.uniform(0.05, 0.45), h, other)


def _add_to_pool(pool: list[tuple[float, Heights]], value: float, h: Heights) -> list[tuple[float, Heights]]:
    """Return the pool with a new member; members that nearly equal a better member are removed."""
    distinct = list[tuple[float, Heights]]()
    for member in sorted([*pool, (value, h)], key=lambda item: item[0]):
        if all(float(np.abs(member[1] - other).mean()) > _MIN_DISTANCE for _, other in distinct):
            distinct.append(member)
    return distinct[:_POOL_SIZE]


def _solve_linear_program(h: Heights, value: float, radius: float, *, symmetric: bool) -> tuple[Heights, float] | None:
    """Return the step within the radius with the smallest maximum overlap to first order, and that overlap."""
    from scipy.optimize import linprog  # pyright: ignore[reportUnknownVariableType]  SciPy says little of its types

    count = len(h)
    overlap = np.correlate(h, 1 - h, mode="full") * (2 / count)
    shifts = np.arange(-(count - 1), count)
    # A step changes an overlap by at most 2 · radius · 2 (each height counts twice), and usually by much less.
    near = overlap > value - min(8 * radius, 1.0)
    if symmetric:
        near &= shifts >= 0
    rows = shifts[near]
    place = np.arange(count)
    forward, backward = place[None] + rows[:, None], place[None] - rows[:, None]
    slopes = np.where((backward >= 0) & (backward < count), 1 - h[np.clip(backward, 0, count - 1)], 0.0)
    slopes -= np.where((forward >= 0) & (forward < count), h[np.clip(forward, 0, count - 1)], 0.0)
    slopes *= 2 / count
    low, high = np.maximum(-radius, -h), np.minimum(radius, 1 - h)
    if symmetric:
        half = (count + 1) // 2
        halved = slopes[:, :half].copy()
        halved[:, : count // 2] += slopes[:, ::-1][:, : count // 2]
        sums = np.where(np.arange(half) < count // 2, 2.0, 1.0)
        slopes, low, high = halved, low[:half], high[:half]
    else:
        half, sums = count, np.ones(count)
    # Scaled by the radius; otherwise the solver's tolerances would be as large as the step.
    table = np.column_stack([slopes, -np.ones(len(rows))])
    solution = linprog(
        np.concatenate([np.zeros(half), [1.0]]),
        A_ub=table,
        b_ub=(value - overlap[near]) / radius,
        A_eq=np.concatenate([sums, [0.0]])[None],
        b_eq=[(count / 2 - float(h.sum())) / radius],
        bounds=np.column_stack([np.append(low / radius, -np.inf), np.append(high / radius, np.inf)]),
        method="highs-ds" if half < 150 else "highs-ipm",
    )
    if solution.status != 0:
        return None
    values = cast("Heights", solution.x)
    step = values[:half] * radius
    if symmetric:
        step = np.concatenate([step, step[: count // 2][::-1]])
    return step, value + float(values[-1]) * radius
