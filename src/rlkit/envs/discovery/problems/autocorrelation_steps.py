"""Local search for the two autocorrelation inequalities, with NumPy and SciPy alone.

It is what a run is compared with, and what programs may call. It imports nothing of rlkit, and can be loaded where
programs run.

Invariant: what is returned is at least as good as what was given.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

type Heights = NDArray[np.float64]

_MOST_PROGRAMMED = 600
"""Pieces beyond which a linear program takes too long, and too much memory."""
_FIRST_RADIUS = 0.05
_LEAST_RADIUS = 1e-8
_LEAST_GAIN = 1e-12
_FFT_FROM = 200
_ROUND = 300


def first_value(f: Heights) -> float:
    """2n · max f*f / (∫f)² of [n] heights: small is good."""
    return float(2 * len(f) * _folded(f, f).max() / f.sum() ** 2)


def second_value(f: Heights) -> float:
    """‖f*f‖₂² / (‖f*f‖₁ ‖f*f‖_∞) of [n] heights: large is good."""
    corners = _folded(f, f)
    return _square(corners) / float(corners.sum() * corners.max())


def polish_first(construction: Heights, seconds: float) -> Heights:
    """A local search for a smaller value of the first inequality.

    Args:
        construction: [n] heights, of which those below 0 are taken for 0.
        seconds: of processor time, after which no new step is begun.

    Raises:
        ValueError: no height is above 0.
    """
    return _polished(construction, seconds, norms=False)


def polish_second(construction: Heights, seconds: float) -> Heights:
    """A local search for a larger value of the second inequality, as `polish_first`."""
    return _polished(construction, seconds, norms=True)


def _polished(construction: Heights, seconds: float, *, norms: bool) -> Heights:
    end_s = time.process_time() + seconds
    f = np.maximum(np.asarray(construction, np.float64), 0)
    if not f.max() > 0:
        raise ValueError("no height is above 0")
    f = f / f.max()
    if len(f) <= _MOST_PROGRAMMED:
        return linear_programs(f, end_s=end_s, norms=norms)
    rate = 0.003
    while time.process_time() < end_s and rate > 1e-6:
        better = descend(f, iterations=_ROUND, norms=norms, rate=rate, first_power=4.0, end_s=end_s)
        rate = rate if loss(better, norms=norms) < loss(f, norms=norms) - _LEAST_GAIN else rate / 4
        f = better
    return f


def loss(f: Heights, *, norms: bool) -> float:
    """The logarithm of the first value, or with `norms` of one by the second: small is good."""
    corners = _folded(f, f)
    top = float(np.log(corners.max()))
    total = float(np.log(f.sum()))
    return top + 2 * total - float(np.log(_square(corners))) if norms else top - 2 * total + float(np.log(2 * len(f)))


def descend(
    f: Heights,
    *,
    iterations: int,
    norms: bool,
    rate: float = 0.02,
    first_power: float = 2.0,
    end_s: float = float("inf"),
) -> Heights:
    """Adam on the logarithm, with the maximum smoothed ever less; heights are squares, and so not below 0."""
    root = np.sqrt(f / f.max())
    best, least = f, loss(f, norms=norms)
    mean, spread = np.zeros(len(f)), np.zeros(len(f))
    for step in range(1, iterations + 1):
        if time.process_time() >= end_s:
            break
        share = step / iterations
        now = root * root
        corners = _folded(now, now)
        sharp = np.exp((corners / corners.max() - 1) * 10 ** (first_power + (5.0 - first_power) * share))
        slope = 2 * _back(sharp / float(sharp @ corners), now)
        slope += (2 if norms else -2) / float(now.sum())
        if norms:
            slope -= 2 * _back(_square_slope(corners) / _square(corners), now)
        gradient = slope * 2 * root
        mean = 0.9 * mean + 0.1 * gradient
        spread = 0.99 * spread + 0.01 * gradient * gradient
        step_size = rate * (1 - 0.95 * share)
        root = root - step_size * (mean / (1 - 0.9**step)) / (np.sqrt(spread / (1 - 0.99**step)) + 1e-12)
        found = root * root
        if (value := loss(found, norms=norms)) < least:
            best, least = found, value
    return best / best.max()


def linear_programs(f: Heights, *, end_s: float, norms: bool, radius: float = _FIRST_RADIUS) -> Heights:
    """A sequence of linear programs, each of f*f as it changes to first order, within a trust region.

    It goes on until the processor time of this process is `end_s` or nothing is gained any more.
    """
    f = f / f.max()
    value = loss(f, norms=norms)
    while time.process_time() < end_s and radius > _LEAST_RADIUS:
        step = _programmed(f, radius, norms=norms)
        moved = f if step is None else np.maximum(f + step, 0)
        gain = value - loss(moved, norms=norms)
        if gain > _LEAST_GAIN:
            f, value = moved / moved.max(), value - gain
            radius = min(2 * radius, 0.2)
        else:
            radius /= 4
    return f


def search(
    seed: int,
    seconds: float,
    *,
    norms: bool,
    start: int = 50,
    told: Callable[[float, Heights], None] = lambda seconds, heights: None,
) -> Heights:
    """Descents from random beginnings, linear programs from the best of them, and both on ever finer grids.

    Args:
        seconds: of processor time.
        norms: of the second inequality, and not of the first.
        start: pieces to begin with.
        told: called with the seconds so far and each new best function.
    """
    rng = np.random.default_rng(seed)
    began_s = time.process_time()
    end_s = began_s + seconds
    best = np.ones(start)

    def kept(f: Heights) -> bool:
        nonlocal best
        if loss(f, norms=norms) >= loss(best, norms=norms) - _LEAST_GAIN:
            return False
        best = f
        told(time.process_time() - began_s, f)
        return True

    while time.process_time() < began_s + seconds / 3:
        f = descend(rng.uniform(0.01, 1, start) ** 2, iterations=1500, norms=norms, end_s=end_s)
        kept(linear_programs(f, end_s=min(end_s, time.process_time() + seconds / 30), norms=norms))
    while time.process_time() < end_s:
        fine = np.repeat(best, 2) if 2 * len(best) <= _MOST_PROGRAMMED else best
        noise = 1 + rng.normal(0, 0.02, len(fine))
        f = descend(fine * np.maximum(noise, 0), iterations=1000, norms=norms, rate=0.01, end_s=end_s)
        kept(linear_programs(f, end_s=min(end_s, time.process_time() + seconds / 6), norms=norms))
    return best


def _folded(a: Heights, b: Heights) -> Heights:
    """[2n − 1] the convolution of two times [n] heights."""
    count = len(a)
    if count < _FFT_FROM:
        return np.convolve(a, b)
    size = 1 << (2 * count - 2).bit_length()
    return np.fft.irfft(np.fft.rfft(a, size) * np.fft.rfft(b, size), size)[: 2 * count - 1]


def _back(weights: Heights, f: Heights) -> Heights:
    """[n] Σ_m w_m f_{m − i}: half the slope of Σ_m w_m (f*f)_m."""
    count = len(f)
    if count < _FFT_FROM:
        return np.convolve(weights, f[::-1], mode="valid")
    size = 1 << (3 * count).bit_length()
    return np.fft.irfft(np.fft.rfft(weights, size) * np.fft.rfft(f[::-1], size), size)[count - 1 : 2 * count - 1]


def _square(corners: Heights) -> float:
    """∫ of the square of the piecewise linear function with these corners, and 0 beside them."""
    y = np.pad(corners, 1)
    return float((y[:-1] ** 2 + y[:-1] * y[1:] + y[1:] ** 2).sum()) / 3


def _square_slope(corners: Heights) -> Heights:
    y = np.pad(corners, 1)
    return (4 * corners + y[:-2] + y[2:]) / 3


def _programmed(f: Heights, radius: float, *, norms: bool) -> Heights | None:
    """The step within the radius that is best to first order."""
    from scipy.optimize import linprog  # pyright: ignore[reportUnknownVariableType]  SciPy says little of its types

    count = len(f)
    corners = _folded(f, f)
    top = float(corners.max())
    near = corners > top - 4 * radius * float(f.sum())  # what no step within the radius can make the greatest
    rows = np.flatnonzero(near)
    place = rows[:, None] - np.arange(count)[None]
    slopes = np.where((place >= 0) & (place < count), 2 * f[np.clip(place, 0, count - 1)], 0.0)
    pull = 2 * _back(_square_slope(corners) / _square(corners), f) * top if norms else np.zeros(count)
    # In steps of the radius, or the tolerances of the solver would be as large as what is looked for.
    solved = linprog(
        np.append(-pull, 1.0),
        A_ub=np.column_stack([slopes, -np.ones(len(rows))]),
        b_ub=(top - corners[near]) / radius,
        A_eq=np.append(np.ones(count), 0.0)[None],
        b_eq=[0.0],
        bounds=np.column_stack([np.append(np.maximum(-1, -f / radius), -np.inf), np.append(np.ones(count), np.inf)]),
        method="highs-ds" if count < 150 else "highs-ipm",
    )
    return cast("Heights", solved.x)[:count] * radius if solved.status == 0 else None
