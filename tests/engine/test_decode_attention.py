"""Attention of one new position, compiled, against torch's in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from rlkit.engine.kernels.cpu_kernels import Floats
from rlkit.engine.kernels.decode_attention import attend

HEADS = st.sampled_from([(1, 1), (2, 1), (6, 2), (9, 3), (5, 5)])
# A head is no whole number of vectors; one; several; more than are summed at a time.
SIZES = st.sampled_from([8, 16, 24, 64, 80, 128])


def cache(rng: np.random.Generator, kv_heads: int, tokens: int, size: int) -> Floats:
    return rng.standard_normal((kv_heads, tokens, size)).astype(np.float32)


@given(HEADS, SIZES, st.integers(1, 3), st.sampled_from([1, 3, 4, 17, 96]), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_a_position_attends_to_the_earlier_positions_of_its_window(
    heads: tuple[int, int], size: int, buckets: int, window: int, seed: int
) -> None:
    query_heads, kv_heads = heads
    rng, tokens = np.random.default_rng(seed), buckets * 32
    row = rng.standard_normal((query_heads + 2 * kv_heads, size)).astype(np.float32) * 2
    keys, values = cache(rng, kv_heads, tokens, size), cache(rng, kv_heads, tokens, size)
    before = keys.copy(), values.copy()
    last, scores, out = int(rng.integers(tokens)), np.empty(tokens, np.float32), np.full(query_heads * size, np.nan)
    mixed = out.astype(np.float32)
    attend(row, keys, values, last, window, scores, mixed)

    q, k, v = (part.numpy() for part in torch.from_numpy(row).split([query_heads, kv_heads, kv_heads]))
    assert np.array_equal(keys[:, last], k)
    assert np.array_equal(values[:, last], v)
    others = np.arange(tokens) != last
    assert np.array_equal(keys[:, others], before[0][:, others])
    assert np.array_equal(values[:, others], before[1][:, others])
    exact = functional.scaled_dot_product_attention(
        torch.from_numpy(q).double()[None, :, None],
        *(torch.from_numpy(t[None, :, max(last + 1 - window, 0) : last + 1]).double() for t in (keys, values)),
        enable_gqa=True,
    )
    np.testing.assert_allclose(mixed, exact.flatten().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [8, 64, 80])
@pytest.mark.parametrize("behind", [np.nan, np.inf, 1e30])
def test_rows_after_the_last_position_are_ignored(size: int, behind: float) -> None:
    rng = np.random.default_rng(0)
    row = rng.standard_normal((5, size)).astype(np.float32)
    keys, values = cache(rng, 1, 64, size), cache(rng, 1, 64, size)
    results: list[Floats] = []
    for filling in (0.0, behind):
        keys[:, 38:], values[:, 38:] = filling, filling
        out = np.empty(3 * size, np.float32)
        attend(row, keys, values, 37, 64, np.full(64, filling, np.float32), out)
        results.append(out)
    assert np.array_equal(*results)
    assert np.isfinite(results[0]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38])
@pytest.mark.parametrize("size", [8, 64])
def test_finite_and_non_finite_values_do_not_mix(size: int, value: float) -> None:
    row, cached, out = np.ones((3, size), np.float32), np.ones((1, 32, size), np.float32), np.empty(size, np.float32)
    row[0, 0] = value
    attend(row, cached, cached.copy(), 3, 32, np.empty(32, np.float32), out)
    scores = torch.from_numpy(row[:1] @ cached[0, :4].T) / size**0.5
    exact = torch.softmax(scores, -1) @ torch.from_numpy(cached[0, :4])
    torch.testing.assert_close(torch.from_numpy(out), exact[0], equal_nan=True)
