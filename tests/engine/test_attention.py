"""Causal attention over packed sequences, compiled and by torch, against the formula in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.engine.model.attention import Attention, Span, lay_out
from rlkit.engine.model.ops import Rope, apply_rope
from rlkit.engine.model.rotary import ALL_POSITIONS

HEADS = st.sampled_from([(1, 1), (2, 1), (6, 2), (9, 3), (5, 5), (32, 1)])
# A head is no whole number of vectors; one; several; more than a tile has.
SIZES = st.sampled_from([2, 6, 8, 16, 24, 64, 80, 128, 200])
# Around the edges of tiles and blocks, too.
WINDOWS = st.sampled_from([ALL_POSITIONS, 1, 5, 31, 40])
LENGTHS = st.one_of(st.integers(1, 12), st.sampled_from([31, 32, 33, 47, 64, 65, 100]))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rope(spans: Sequence[Span], rows: int, size: int) -> Rope:
    where = torch.zeros(rows)
    for span in spans:
        where[span.rows] = torch.arange(span.position, span.position + span.length, dtype=torch.float32)
    angles = torch.outer(where, torch.logspace(0, -3, size // 2)).repeat(1, 2)[:, None]
    return angles.cos(), angles.sin()


def formula(rows: Tensor, spans: Sequence[Span], by: Rope, kv_heads: int, window: int) -> Tensor:
    heads = rows.shape[1] - 2 * kv_heads
    rows = apply_rope(rows, heads + kv_heads, by)
    out = [torch.zeros(heads * rows.shape[2], dtype=rows.dtype)] * len(rows)
    for span in spans:
        before = [] if span.prefix is None else list(range(len(rows)))[span.prefix.rows]
        for i in range(span.length):
            positions = [*before, *range(span.start, span.start + i + 1)][-window:]
            q = rows[span.start + i, :heads].view(kv_heads, -1, rows.shape[2])
            k, v = rows[positions, heads : heads + kv_heads], rows[positions, heads + kv_heads :]
            scores = torch.einsum("kgd,tkd->kgt", q, k) / rows.shape[2] ** 0.5
            out[span.start + i] = torch.einsum("kgt,tkd->kgd", torch.softmax(scores, -1), v).flatten()
    return torch.stack(out)


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def check(
    spans: Sequence[Span], rows: int, heads: tuple[int, int], size: int, seed: int, window: int = ALL_POSITIONS
) -> None:
    by, count = rope(spans, rows, size), heads[0] + 2 * heads[1]
    x = random(rows, count, size, seed=seed, scale=1.5).requires_grad_()
    exact = x.detach().double().requires_grad_()
    # Both ways through the module: the kernel, and torch's own operations, which take other types than float32.
    by_kernel, _ = Attention(spans, by, heads[1], window)(x * 1)
    torch_x = exact.detach().clone().requires_grad_()
    by_torch, _ = Attention(spans, by, heads[1], window)(torch_x * 1)
    expected = formula(exact, spans, by, heads[1], window)
    torch.testing.assert_close(by_kernel.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(by_torch, expected, rtol=1e-9, atol=1e-9)
    upstream = random(*expected.shape, seed=seed + 1)
    by_kernel.backward(upstream)
    for result in (by_torch, expected):
        result.backward(upstream.double())
    assert x.grad is not None
    assert torch_x.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(torch_x.grad, exact.grad, rtol=1e-9, atol=1e-9)
    assert (x.grad - exact.grad).norm() <= 1e-5 * exact.grad.norm() + 1e-6


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(0, 9), HEADS, SIZES, WINDOWS, st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_attention_of_whole_sequences_equals_the_formula(
    lengths: list[int], padding: int, heads: tuple[int, int], size: int, window: int, seed: int
) -> None:
    check(lay_out(lengths), sum(lengths) + padding, heads, size, seed, window)


@given(LENGTHS, st.lists(LENGTHS, min_size=1, max_size=3), HEADS, SIZES, WINDOWS, st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_attention_of_sequences_with_a_shared_prefix_equals_the_formula(
    shared: int, lengths: list[int], heads: tuple[int, int], size: int, window: int, seed: int
) -> None:
    prefix = Span(0, shared)
    spans = [prefix, *(Span(shared + s.start, s.length, prefix) for s in lay_out(lengths))]
    check(spans, shared + sum(lengths), heads, size, seed, window)


@pytest.mark.parametrize("window", [ALL_POSITIONS, 90])
@pytest.mark.parametrize(("shared", "lengths"), [(300, [40, 260]), (200, [70]), (256, [1, 33]), (30, [700])])
def test_a_gradient_that_is_computed_for_parts_of_the_keys_equals_the_formula(
    shared: int, lengths: list[int], window: int
) -> None:
    prefix = Span(0, shared)
    spans = [prefix, *(Span(shared + s.start, s.length, prefix) for s in lay_out(lengths))]
    check(spans, shared + sum(lengths), (2, 1), 24, 0, window)


@pytest.mark.parametrize("window", [ALL_POSITIONS, 50])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_sequence_has_the_same_bits_with_any_neighbours(threads: int, window: int) -> None:
    lengths = [90, 3, 240, 33, 128]
    spans, kv_heads = lay_out(lengths), 5
    x, by = random(sum(lengths), 20, 64, seed=0), rope(spans, sum(lengths), 64)
    upstream = random(sum(lengths), 640, seed=1)

    def run(rows: slice, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        inputs = x[rows].clone().requires_grad_()
        attention = Attention(spans, (by[0][rows], by[1][rows]), kv_heads, window)
        mixed, _ = attention(inputs * 1)
        mixed.backward(upstream[rows])
        assert inputs.grad is not None
        return mixed.detach(), inputs.grad

    torch.set_num_threads(threads)
    together = run(slice(None), spans)
    torch.set_num_threads(1)
    for span in spans:
        for alone, among in zip(run(span.rows, lay_out([span.length])), together, strict=True):
            assert torch.equal(alone, among[span.rows])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_non_finite_values_stay_in_their_sequence(value: float) -> None:
    spans = lay_out([70, 40, 90])
    x, upstream = random(200, 5, 24, seed=0), random(200, 72, seed=1)
    results: list[tuple[Tensor, Tensor]] = []
    for first in (0.0, value):
        rows = x.clone()
        rows[:70] += first
        rows.requires_grad_()
        mixed, _ = Attention(spans, rope(spans, 200, 24), 1)(rows * 1)
        mixed.backward(upstream)
        assert rows.grad is not None
        results.append((mixed.detach(), rows.grad))
    for plain, beside in zip(*results, strict=True):
        assert torch.equal(plain[70:], beside[70:])
        assert torch.isfinite(plain).all()
    # 3e38 alone overflows only where numbers are multiplied: in the scores, which then are not numbers.
    assert torch.isnan(results[1][0][:70]).any()


def test_a_long_sequence_is_computed_in_larger_blocks() -> None:
    spans = lay_out([1100])
    by, x = rope(spans, 1100, 16), random(1100, 4, 16, seed=0).requires_grad_()
    exact = x.detach().double().requires_grad_()
    upstream = random(1100, 32, seed=1)
    for rows in (x, exact):
        mixed, _ = Attention(spans, by, 1)(rows * 1)
        mixed.backward(upstream.to(mixed.dtype))
    assert x.grad is not None
    assert exact.grad is not None
    assert (x.grad - exact.grad).norm() <= 1e-5 * exact.grad.norm()


def test_rows_without_a_sequence_give_zeros() -> None:
    x = random(8, 5, 8, seed=0).requires_grad_()
    mixed, _ = Attention([], rope([], 8, 8), 1)(x * 1)
    mixed.sum().backward()
    assert torch.equal(mixed, torch.zeros(8, 24))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_autograd_detects_that_the_rows_were_changed_in_place() -> None:
    spans = lay_out([6])
    rows = random(6, 5, 8, seed=0).requires_grad_().exp()  # whose gradient is its result
    mixed, _ = Attention(spans, rope(spans, 6, 8), 1)(rows)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mixed.sum().backward()


def test_queries_and_keys_are_rotated_and_values_unchanged() -> None:
    spans = lay_out([5, 7])
    x, by = random(12, 5, 8, seed=0), rope(spans, 12, 8)
    expected = apply_rope(x, 4, by)
    for rows in (x.clone(), x.double()):
        _, after = Attention(spans, by, 1)(rows)
        torch.testing.assert_close(after.float(), expected)
