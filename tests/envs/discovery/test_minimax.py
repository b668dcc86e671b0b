from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.envs.discovery.problems.minimax import minimise_maximum

pytest.importorskip("scipy")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(2, 40), st.booleans(), st.sampled_from([0.0, 0.3, 1.0])
)
def test_a_solution_is_as_good_as_that_of_highs(seed: int, rows: int, count: int, pulled: bool, equal: float) -> None:
    from scipy.optimize import linprog

    rng = np.random.default_rng(seed)
    slopes = rng.normal(size=(rows, count))
    slopes[rng.random(rows) < equal] = slopes[0]  # as in a program whose matrix is singular
    limits, pull = rng.uniform(0, 2, rows) * (rng.random(rows) < 0.5), rng.normal(size=count) * pulled
    low, high = -rng.uniform(0, 1, count), rng.uniform(0.01, 1, count)
    weights = rng.integers(1, 3, count).astype(float)
    total = float(weights @ (low + rng.random(count) * (high - low)))
    expected = linprog(
        np.append(-pull, 1.0),
        A_ub=np.column_stack([slopes, -np.ones(rows)]),
        b_ub=limits,
        A_eq=np.append(weights, 0.0)[None],
        b_eq=[total],
        bounds=[*zip(low, high, strict=True), (None, None)],
    )
    x, bound = minimise_maximum(slopes, limits, low, high, weights=weights, total=total, pull=pull)
    assert ((low < x) & (x < high)).all()
    assert (slopes @ x - limits).max() <= bound
    assert weights @ x == pytest.approx(total, abs=1e-6)
    assert bound - pull @ x == pytest.approx(expected.fun, abs=1e-6)
