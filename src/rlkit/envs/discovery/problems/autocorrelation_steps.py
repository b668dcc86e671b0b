"""Values of the autocorrelation inequalities, and local search for them, with NumPy and SciPy only.

The search is a run's baseline, and a helper that programs can call.

Invariant: a result is at least as good as the initial construction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlkit.envs.discovery.problems.minimax import minimise_maximum

type Heights = NDArray[np.float64]
type Objective = Literal["first", "second", "third", "third_absolute"]
"""Inequality whose value a search improves; heights may be negative in the last two, which differ in f*f and |f*f|."""

_MAX_LINEAR_PROGRAM_PIECES = 600  # maximum pieces for linear programs; more pieces need too much time and memory
_SIGNED: tuple[Objective, ...] = ("third", "third_absolute")
_FIRST_RADIUS = 0.05
_MIN_RADIUS = 1e-8
_MIN_GAIN = 1e-12
_FFT_FROM = 600


def compute_value(f: Heights, objective: Objective) -> float:
    """Return the value of [n] heights: for the second inequality larger is better, otherwise smaller."""
    corners = convolve(f)
    if objective == "second":
        return _integrate_square(corners) / float(corners.sum() * corners.max())
    return float(2 * len(f) * _peak(corners, objective) / f.sum() ** 2)


def convolve(f: Heights, other: Heights | None = None) -> Heights:
    """Return the full convolution of heights with others, by default with themselves."""
    other = f if other is None else other
    if len(other) < _FFT_FROM:
        return np.convolve(f, other)
    size = 1 << (len(f) + len(other) - 2).bit_length()
    spectrum = np.fft.rfft(f, size)
    product = np.fft.irfft(spectrum * (spectrum if other is f else np.fft.rfft(other, size)), size)
    corners = product[: len(f) + len(other) - 1]
    return corners if f.min() < 0 or other.min() < 0 else np.maximum(corners, 0)


def _polish(construction: Heights, seconds: float, objective: Objective) -> Heights:
    """Search locally for a better value.

    Args:
        construction: [n] heights; negative heights are set to 0 if the inequality does not permit them.
        seconds: processor time after which no new step starts.

    Raises:
        ValueError: no height is above 0.
    """
    end_s = time.process_time() + seconds
    f = np.maximum(construction, -np.inf if objective in _SIGNED else 0.0)
    if not np.abs(f).max() > 0:
        raise ValueError("no height is above 0")
    f = _rescale(f)
    if len(f) <= _MAX_LINEAR_PROGRAM_PIECES:
        return linear_programs(f, end_s=end_s, objective=objective)
    rate = 0.003
    while time.process_time() < end_s and rate > 1e-6:
        improved = descend(f, iterations=300, objective=objective, rate=rate, first_power=4.0, end_s=end_s)
        rate = rate if loss(improved, objective=objective) < loss(f, objective=objective) - _MIN_GAIN else rate / 4
        f = improved
    return f


polish_first = partial(_polish, objective="first")
polish_second = partial(_polish, objective="second")
polish_third = partial(_polish, objective="third")
polish_third_absolute = partial(_polish, objective="third_absolute")


def loss(f: Heights, *, objective: Objective) -> float:
    """Return the log of the value, with the sign for which smaller is better."""
    return (-1 if objective == "second" else 1) * math.log(compute_value(f, objective))


def descend(
    f: Heights,
    *,
    iterations: int,
    objective: Objective,
    rate: float = 0.02,
    first_power: float = 2.0,
    end_s: float = float("inf"),
) -> Heights:
    """Minimise `loss` with Adam and decreasing smoothing of the maximum; unsigned heights are squares of variables."""
    is_signed = objective in _SIGNED
    root = _rescale(f) if is_signed else np.sqrt(f / f.max())
    best, best_loss = f, loss(f, objective=objective)
    mean, spread = np.zeros(len(f)), np.zeros(len(f))
    for step in range(1, iterations + 1):
        if time.process_time() >= end_s:
            break
        share = step / iterations
        heights = root if is_signed else root * root
        corners = convolve(heights)
        sharpness = 10 ** (first_power + (5.0 - first_power) * share)
        relative = corners / _peak(corners, objective)
        sharp = np.exp((relative - 1) * sharpness)
        if objective == "third_absolute":
            sharp -= np.exp((-relative - 1) * sharpness)
        slope = 2 * _correlate_back(sharp / float(sharp @ corners), heights)
        slope += (2 if objective == "second" else -2) / float(heights.sum())
        if objective == "second":
            slope -= 2 * _square_slope(corners, heights)
        gradient = slope if is_signed else slope * 2 * root
        mean = 0.9 * mean + 0.1 * gradient
        spread = 0.99 * spread + 0.01 * gradient * gradient
        step_size = rate * (1 - 0.95 * share)
        root = root - step_size * (mean / (1 - 0.9**step)) / (np.sqrt(spread / (1 - 0.99**step)) + 1e-12)
        candidate = root if is_signed else root * root
        if (value := loss(candidate, objective=objective)) < best_loss:
            best, best_loss = candidate, value
    return _rescale(best)


def linear_programs(f: Heights, *, end_s: float, objective: Objective, radius: float = _FIRST_RADIUS) -> Heights:
    """Solve a sequence of linear programs until there is no gain, or the process reaches the processor time `end_s`.

    Each linear program uses f*f to first order within a trust region.
    """
    f = _rescale(f)
    value = loss(f, objective=objective)
    while time.process_time() < end_s and radius > _MIN_RADIUS:
        candidate = f + _solve_linear_program(f, radius, objective=objective)
        candidate = candidate if objective in _SIGNED else np.maximum(candidate, 0.0)
        gain = value - loss(candidate, objective=objective)
        if gain > _MIN_GAIN:
            f, value = _rescale(candidate), value - gain
            radius = min(2 * radius, 0.2)
        else:
            radius /= 4
    return f


def search(
    seed: int,
    seconds: float,
    *,
    objective: Objective,
    start: int = 50,
    on_best: Callable[[float, Heights], None] = lambda seconds, heights: None,
) -> Heights:
    """Search from random step functions by descent and linear programs, on increasingly fine grids.

    Args:
        seconds: processor time.
        start: initial number of pieces.
        on_best: called with the elapsed seconds and each new best function.
    """
    rng = np.random.default_rng(seed)
    began_s = time.process_time()
    end_s = began_s + seconds
    best = np.ones(start)

    def keep_if_better(f: Heights) -> None:
        nonlocal best
        if loss(f, objective=objective) < loss(best, objective=objective) - _MIN_GAIN:
            best = f
            on_best(time.process_time() - began_s, f)

    while time.process_time() < began_s + seconds / 3:
        f = descend(rng.uniform(0.01, 1, start) ** 2, iterations=1500, objective=objective, end_s=end_s)
        keep_if_better(linear_programs(f, end_s=min(end_s, time.process_time() + seconds / 30), objective=objective))
    while time.process_time() < end_s:
        fine = np.repeat(best, 2) if 2 * len(best) <= _MAX_LINEAR_PROGRAM_PIECES else best
        noise = 1 + rng.normal(0, 0.02, len(fine))
        f = descend(fine * np.maximum(noise, 0), iterations=1000, objective=objective, rate=0.01, end_s=end_s)
        keep_if_better(linear_programs(f, end_s=min(end_s, time.process_time() + seconds / 6), objective=objective))
    return best


def _rescale(f: Heights) -> Heights:
    return f / np.abs(f).max()


def _peak(corners: Heights, objective: Objective) -> float:
    return float((np.abs(corners) if objective == "third_absolute" else corners).max())


def _correlate_back(weights: Heights, f: Heights) -> Heights:
    """Return [n] Σ_m w_m f_{m − i}, half the gradient of Σ_m w_m (f*f)_m."""
    if len(f) < _FFT_FROM:
        return np.convolve(weights, f[::-1], mode="valid")
    return convolve(weights, f[::-1])[len(f) - 1 : 2 * len(f) - 1]


def _integrate_square(corners: Heights) -> float:
    """Return ∫ g², where g is the piecewise linear function with these corners, and 0 outside."""
    y = np.pad(corners, 1)
    return float((y[:-1] ** 2 + y[:-1] * y[1:] + y[1:] ** 2).sum()) / 3


def _square_slope(corners: Heights, f: Heights) -> Heights:
    """Return half the gradient of log ∫ (f*f)² by [n] heights."""
    y = np.pad(corners, 1)
    return _correlate_back((4 * corners + y[:-2] + y[2:]) / 3 / _integrate_square(corners), f)


def _solve_linear_program(f: Heights, radius: float, *, objective: Objective) -> Heights:
    """Return the best step to first order within the radius."""
    count = len(f)
    corners = convolve(f)
    top = _peak(corners, objective)
    # A row of the program bounds f*f at a corner or, for an absolute value, −f*f. Other corners cannot become the
    # maximum within the radius.
    signs = np.array([[1.0], [-1.0]] if objective == "third_absolute" else [[1.0]])
    sides, rows = np.nonzero(signs * corners > top - 4 * radius * float(np.abs(f).sum()))
    signs = signs[sides]
    offset = rows[:, None] - np.arange(count)[None]
    # Scaled by the radius; otherwise the solver's tolerance would be as large as the step.
    step, _ = minimise_maximum(
        signs * np.where((offset >= 0) & (offset < count), 2 * f[np.clip(offset, 0, count - 1)], 0.0),
        (top - signs[:, 0] * corners[rows]) / radius,
        np.full(count, -1.0) if objective in _SIGNED else np.maximum(-1, -f / radius),
        np.ones(count),
        weights=np.ones(count),
        total=0.0,
        pull=2 * _square_slope(corners, f) * top if objective == "second" else 0.0,
    )
    return step * radius
