"""Confidence intervals of scores.

Invariant: intervals are computed over tasks, because attempts at one task are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

COVERAGE = 0.95
"""Probability that an interval contains the true value."""

_Z = NormalDist().inv_cdf((1 + COVERAGE) / 2)


@dataclass(frozen=True, slots=True)
class Score:
    """Mean of values from 0 to 1, one per task, with the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def estimate_mean(values: Sequence[float]) -> Score:
    """Return the mean of values from 0 to 1, one per task, with a 95 % interval.

    The interval is Wilson's for the effective number of tasks n = m(1 − m) / s², with the mean m and its standard error
    s. If all values are equal, n is the number of tasks.
    Source: Wilson 1927; the effective number as in Korn and Graubard 1998.
    """
    array = np.asarray(values, np.float64)
    tasks, mean = len(array), float(array.mean())
    squared_error = float(array.var(ddof=1)) / tasks if tasks > 1 else 0.0
    effective = mean * (1 - mean) / squared_error if squared_error > 0 and 0 < mean < 1 else float(tasks)
    scale = 1 + _Z**2 / effective
    centre = (mean + _Z**2 / (2 * effective)) / scale
    half_width = _Z / scale * math.sqrt(mean * (1 - mean) / effective + _Z**2 / (4 * effective**2))
    return Score(mean, max(0.0, min(mean, centre - half_width)), min(1.0, max(mean, centre + half_width)))
