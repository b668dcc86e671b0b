"""Local search for Erdős' minimum overlap, with NumPy and SciPy alone.

It is what a run is compared with, and what programs may call: a descent through a smoothed maximum, a sequence of
linear programs, basin hopping, and finer grids. It imports nothing of rlkit, and can be loaded where programs run.

Invariant: what is returned is a valid construction that is at least as good as what was given.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

type Heights = NDArray[np.float64]

_LEAST_RADIUS = 1e-10
_LEAST_GAIN = 1e-13
_FIRST_RADIUS = 0.02
_POOL = 6
_BALANCED = 1e-14  # for each piece: the verifier rescales by more, and 1 may then be passed
_BISECTIONS = 80
_SAME = 0.01


def c5(h: Heights) -> float:
    """The greatest overlap of [n] heights that sum to n/2."""
    return float(np.correlate(h, 1 - h, mode="full").max()) * 2 / len(h)


def upsample(h: Heights, times: int) -> Heights:
    """The same step function in more pieces; C₅ stays exactly what it was."""
    return np.repeat(h, times)


def balanced(h: Heights) -> Heights:
    """[n] heights inside [0, 1] that sum to n/2, as near to those given as a common shift makes them."""
    count = len(h)
    if abs(float(h.sum()) - count / 2) < _BALANCED * count and h.min() >= 0 and h.max() <= 1:
        return h
    low, high = -1.0 - float(h.max()), 1.0 - float(h.min())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if float(np.clip(h + middle, 0, 1).sum()) < count / 2:
            low = middle
        else:
            high = middle
    return np.clip(h + high, 0, 1)


def mirrored(h: Heights) -> Heights:
    """The mean of [n] heights and their mirror image."""
    return (h + h[::-1]) / 2


def descend(h: Heights, *, iterations: int, symmetric: bool, rate: float = 0.05) -> Heights:
    """Adam on the log of the sum of the exponentials of all overlaps, ever steeper, through a sigmoid.

    The heights are σ(θ + b), with b such that they sum to n/2.
    """
    count = len(h)
    theta = np.log(np.clip(h, 1e-4, 1 - 1e-4) / (1 - np.clip(h, 1e-4, 1 - 1e-4)))
    first, second = np.zeros(count), np.zeros(count)
    theta, best = _centred(theta)
    least = c5(best)
    for step in range(1, iterations + 1):
        theta, now = _centred(theta)
        overlap = np.correlate(now, 1 - now, mode="full") * (2 / count)
        top = float(overlap.max())
        if top < least:
            best, least = now, top
        share = step / iterations
        weights = np.exp((overlap - top) * 10 ** (2.0 + 3.0 * share))
        gradient = _gradient(now, weights / weights.sum())
        slope = now * (1 - now)
        gradient = slope * (gradient - float(gradient @ slope) / float(slope.sum()))
        if symmetric:
            gradient = mirrored(gradient)
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient * gradient
        step_size = rate * (1 - 0.95 * share)
        theta -= step_size * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-12)
        theta = np.clip(theta, -16, 16)
    return best


def polish(construction: Heights, seconds: float) -> Heights:
    """A sequence of linear programs, each of the overlaps as they change to first order, within a trust region.

    Args:
        construction: [n] heights, which are rescaled to the sum n/2 where that leaves them in [0, 1].
        seconds: of processor time, after which no new program is begun.
    """
    h = np.asarray(construction, np.float64)
    rescaled = h * (len(h) / 2 / float(h.sum())) if h.sum() > 0 else h
    h = rescaled if rescaled.min() >= 0 and rescaled.max() <= 1 else h
    symmetric = bool(np.abs(h - h[::-1]).max() < 1e-9)
    return linear_programs(h, end_s=time.process_time() + seconds, symmetric=symmetric)


def linear_programs(
    h: Heights, *, end_s: float, symmetric: bool, radius: float = _FIRST_RADIUS, most: int = 10_000
) -> Heights:
    """As `polish`, until the processor time of this process is `end_s` or nothing is gained any more."""
    h = balanced(h)
    value = c5(h)
    stale = 0
    for _ in range(most):
        if time.process_time() >= end_s or radius < _LEAST_RADIUS or stale >= 3:
            break
        step = _programmed(h, value, radius, symmetric=symmetric)
        if step is None:
            radius /= 4
            continue
        moved = balanced(np.clip(h + step[0], 0, 1))
        gain, hoped = value - c5(moved), value - step[1]
        if gain > 0:
            stale = stale + 1 if gain < _LEAST_GAIN else 0
            h, value = moved, value - gain
            radius *= 2 if gain > 0.7 * hoped else 1 if gain > 0.3 * hoped else 0.5
        else:
            radius /= 4
    return h


def search(
    seed: int,
    seconds: float,
    *,
    start: int = 60,
    rungs: tuple[int, ...] = (2, 2, 2),
    told: Callable[[float, Heights], None] = lambda seconds, h: None,
) -> Heights:
    """From random beginnings: basin hopping over symmetric step functions, on a grid that is refined now and then.

    Args:
        seconds: of processor time.
        start: pieces at first.
        rungs: by which the number of pieces is multiplied, one after the other.
        told: called with the seconds so far and each new best function.
    """
    rng = np.random.default_rng(seed)
    began_s = time.process_time()
    share = (0.12, 0.4, 0.75, 1.0)
    pool = list[tuple[float, Heights]]()
    best = np.inf
    for rung in range(len(rungs) + 1):
        end_s = began_s + seconds * share[min(rung + 4 - len(rungs) - 1, 3)]
        if rung:
            pool = [(value, upsample(h, rungs[rung - 1])) for value, h in pool[: max(2, _POOL - 2 * rung)]]
            pool = [
                (c5(h), h) for h in (linear_programs(h, end_s=end_s, symmetric=True, radius=0.01) for _, h in pool[:1])
            ] + pool[1:]
        while time.process_time() < end_s:
            count = len(pool[0][1]) if pool else start
            if len(pool) < _POOL and not rung:
                h = mirrored(np.clip(0.5 + rng.uniform(-0.4, 0.4, count), 0, 1))
                h = descend(h, iterations=1500, symmetric=True)
            else:
                h = pool[int(rng.integers(len(pool)) * rng.random())][1]
                if rng.random() < 0.3:
                    h = _crossed(h, pool[int(rng.integers(len(pool)))][1], rng)
                h = descend(_shaken(h, rng), iterations=400, symmetric=True, rate=0.03)
            h = linear_programs(h, end_s=end_s, symmetric=True, most=60 if rung == 0 else 40)
            value = c5(h)  # of heights that sum to n/2, or it would mean nothing
            pool = _joined(pool, value, h)
            if value < best:
                best = value
                told(time.process_time() - began_s, h)
    return pool[0][1]


def _centred(theta: Heights) -> tuple[Heights, Heights]:
    """θ moved so that the sigmoids sum to half their number, and the sigmoids."""
    for _ in range(3):
        h = 1 / (1 + np.exp(-theta))
        theta = theta - (float(h.sum()) - len(h) / 2) / max(float((h * (1 - h)).sum()), 1e-9)
    h = 1 / (1 + np.exp(-theta))
    return theta, h * (len(h) / 2 / float(h.sum()))


def _gradient(h: Heights, weights: Heights) -> Heights:
    """[n] Σ_m w_m ∂O_m/∂h_j of the overlaps at the [2n − 1] shifts."""
    ahead = np.convolve(weights, 1 - h, mode="valid")
    behind = np.correlate(weights, h, mode="valid")[::-1]
    return (ahead - behind) * (2 / len(h))


def _shaken(h: Heights, rng: np.random.Generator) -> Heights:
    count = len(h)
    scale = 10 ** rng.uniform(-2.0, -0.5)
    noise = rng.normal(0, scale, count)
    if rng.random() < 0.5:  # a part of it only
        place, width = rng.integers(count), max(2, int(count * rng.uniform(0.05, 0.4)))
        noise *= np.abs((np.arange(count) - place + count // 2) % count - count // 2) < width
    return np.clip(mirrored(h + noise), 0, 1)


def _crossed(h: Heights, other: Heights, rng: np.random.Generator) -> Heights:
    """One inside a window about the middle, and the other outside of it."""
    count = len(h)
    distance = np.abs(np.arange(count) - (count - 1) / 2) / count
    return np.where(distance < rng.uniform(0.05, 0.45), h, other)


def _joined(pool: list[tuple[float, Heights]], value: float, h: Heights) -> list[tuple[float, Heights]]:
    """The pool with one more, without those that are nearly the same as a better one, so that it stays varied."""
    kept = list[tuple[float, Heights]]()
    for one in sorted([*pool, (value, h)], key=lambda one: one[0]):
        if all(float(np.abs(one[1] - other).mean()) > _SAME for _, other in kept):
            kept.append(one)
    return kept[:_POOL]


def _programmed(h: Heights, value: float, radius: float, *, symmetric: bool) -> tuple[Heights, float] | None:
    """The step within the radius that lessens the greatest overlap most to first order, and what it comes to then."""
    from scipy.optimize import linprog  # pyright: ignore[reportUnknownVariableType]  SciPy says little of its types

    count = len(h)
    overlap = np.correlate(h, 1 - h, mode="full") * (2 / count)
    shifts = np.arange(-(count - 1), count)
    # An overlap changes by at most 2 · radius · 2 (each height counts in it twice), and mostly by far less.
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
        folded = slopes[:, :half].copy()
        folded[:, : count // 2] += slopes[:, ::-1][:, : count // 2]
        sums = np.where(np.arange(half) < count // 2, 2.0, 1.0)
        slopes, low, high = folded, low[:half], high[:half]
    else:
        half, sums = count, np.ones(count)
    # Scaled by the radius, or the tolerances of the solver would be as large as what is looked for.
    table = np.column_stack([slopes, -np.ones(len(rows))])
    solved = linprog(
        np.concatenate([np.zeros(half), [1.0]]),
        A_ub=table,
        b_ub=(value - overlap[near]) / radius,
        A_eq=np.concatenate([sums, [0.0]])[None],
        b_eq=[(count / 2 - float(h.sum())) / radius],
        bounds=np.column_stack([np.append(low / radius, -np.inf), np.append(high / radius, np.inf)]),
        method="highs-ds" if half < 150 else "highs-ipm",
    )
    if solved.status != 0:
        return None
    found = cast("Heights", solved.x)
    step = found[:half] * radius
    if symmetric:
        step = np.concatenate([step, step[: count // 2][::-1]])
    return step, value + float(found[-1]) * radius
