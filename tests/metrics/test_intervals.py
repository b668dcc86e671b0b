"""Intervals of scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.metrics.intervals import estimate_mean


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_interval_contains_the_mean_and_stays_between_0_and_1(values: list[float]) -> None:
    estimate = estimate_mean(values)
    assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1
    if len(values) > 1:
        assert estimate.high > estimate.low


def test_interval_of_single_attempts_is_wilsons() -> None:
    # 30 of 101 tasks; the variance that is estimated from them is that of 100
    estimate = estimate_mean([1.0] * 30 + [0.0] * 71)
    p, n, z = 30 / 101, 100, 1.959963984540054
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    assert (estimate.low, estimate.high) == (pytest.approx(middle - half), pytest.approx(middle + half))


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_95_percent_of_intervals_contain_the_true_value(p: float) -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(500):
        chances = rng.beta(p * 4, (1 - p) * 4, size=60)  # tasks differ, and each is tried four times
        estimate = estimate_mean((rng.binomial(4, chances) / 4).tolist())
        covered += estimate.low <= p <= estimate.high
    assert 0.92 <= covered / 500 <= 0.99
