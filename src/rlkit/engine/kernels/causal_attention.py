"""Causal attention inside packed sequences, and its gradient, compiled for this processor.

Invariant: what is computed of a sequence depends on its own rows only, bit for bit. Among them a later one that is not
finite may reach earlier ones, because what a query does not see is multiplied by zero.

Of each head a block of queries is held against all keys up to its last one. Nothing but the largest score and the sum
of the weights of each query is kept for the way back, where scores and weights are computed again (Dao et al. 2022,
with whole rows in place of the softmax that goes along). Factors are copied into rooms that end with whole tiles, so
that products need no ends of their own. Behind a sequence's last row lies what was left of another one: it comes into
rows and columns behind the last one only, which nobody reads, since sums run over what there is.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportCallIssue=false
# (numba and llvmlite bring no types, and an intrinsic is called without its first argument)

from __future__ import annotations

import numpy as np
from numba import njit

from rlkit.engine.kernels.cpu_kernels import Floats, Integers, exponential, largest
from rlkit.engine.kernels.jit_cache import FAST, jit_kernel
from rlkit.engine.kernels.llvm import LANES, SMALL_COLUMNS, SMALL_ROWS, add_small_tile, small_tile

# A block of queries, a multiple of `SMALL_ROWS` on every processor: small where much of a block would be hidden, large
# where keys and values do not fit the cache.
_FEW, _QUERIES, _LONG = 32, 64, 1024
_STEPS = 128  # so many rows of a factor stay in the first cache

_ZERO, _ONE = np.float32(0), np.float32(1)


@jit_kernel(fast=True)
def attention(rows: Floats, spans: Integers, kv_heads: int, first: int, last: int, out: Floats, shape: Floats) -> None:  # noqa: PLR0917  compiled
    """Causal attention of the queries that belong to some of the key heads (Vaswani et al. 2017, eq. 1).

    Args:
        rows: [N, H + 2K, D], queries, keys and values.
        spans: [S, 4], of each sequence where it starts and its length, and of the prefix that it attends to as well.
        first: the first key head; up to `last`, which is not computed.
        out: [N, H, D], the result; rows of no span are left alone.
        shape: [N, H, 2], a result too: a query's largest score, and what its weights are divided by.
    """
    size = rows.shape[2]
    heads = rows.shape[1] - 2 * kv_heads
    group = heads // kv_heads
    scale = _ONE / np.sqrt(np.float32(size))
    wide, longest = _whole(size), _longest(spans)
    keys, values, turned = _room(longest, wide), _room(longest, wide), _room(size, longest)
    queries, mixed, weights = _room(_QUERIES, wide), _room(_QUERIES, wide), _room(_QUERIES, longest)
    for k in range(first, last):
        for span in spans:
            start, length, _, prefix = span
            _gather(rows, heads + k, span, keys)
            _gather(rows, heads + kv_heads + k, span, values)
            _turn(keys, prefix + length, turned)
            block = _FEW if prefix + length < _LONG else _QUERIES
            for head in range(k * group, (k + 1) * group):
                for query in range(0, length, block):
                    at, count = start + query, min(block, length - query)
                    visible, block_shape = prefix + query + count, shape[at : at + count, head]
                    _copy(rows, head, at, count, queries, 0)
                    _multiply(queries, False, turned, size, weights, count, visible)
                    _measure(weights, prefix + query, block_shape)
                    _weigh(weights, prefix + query, scale, block_shape)
                    _add_up(weights, _whole(visible), block_shape)
                    _multiply(weights, False, values, visible, mixed, count, size)
                    _divide(mixed, wide, block_shape)
                    _put(mixed, 0, count, out, head, at)


@jit_kernel(fast=True)
def attention_gradient(  # noqa: PLR0917  compiled
    rows: Floats,
    spans: Integers,
    kv_heads: int,
    first: int,
    last: int,
    out: Floats,
    shape: Floats,
    by_out: Floats,
    by_rows: Floats,
) -> None:
    """The gradient of `attention` at `rows` for one at its results, `by_out [N, H, D]`.

    Args:
        rows: as they were given to `attention`, with all up to `last`; `out` and `shape` are its results.
        by_rows: [N, H + 2K, D], the result; rows of no span are left alone. A prefix stands before what attends to it.
    """
    size = rows.shape[2]
    heads = rows.shape[1] - 2 * kv_heads
    group = heads // kv_heads
    scale = _ONE / np.sqrt(np.float32(size))
    wide, longest = _whole(size), _longest(spans)
    keys, turned_keys, by_keys = _room(longest, wide), _room(size, longest), _room(longest, wide)
    values, turned_values, by_values = _room(longest, wide), _room(size, longest), _room(longest, wide)
    queries, by_queries, weights = _room(_QUERIES, wide), _room(_QUERIES, wide), _room(_QUERIES, longest)
    mixed, by_mixed, by_weights = _room(_QUERIES, wide), _room(_QUERIES, wide), _room(_QUERIES, longest)
    for k in range(first, last):
        for span in spans:
            start, length, _, prefix = span
            _gather(rows, heads + k, span, keys)
            _gather(rows, heads + kv_heads + k, span, values)
            _turn(keys, prefix + length, turned_keys)
            _turn(values, prefix + length, turned_values)
            _clear(by_keys, prefix + length, wide)
            _clear(by_values, prefix + length, wide)
            block = _FEW if prefix + length < _LONG else _QUERIES
            for head in range(k * group, (k + 1) * group):
                for query in range(0, length, block):
                    at, count = start + query, min(block, length - query)
                    visible, block_shape = prefix + query + count, shape[at : at + count, head]
                    _copy(rows, head, at, count, queries, 0)
                    _copy(out, head, at, count, mixed, 0)
                    _copy(by_out, head, at, count, by_mixed, 0)
                    _multiply(queries, False, turned_keys, size, weights, count, visible)
                    _weigh(weights, prefix + query, scale, block_shape)
                    _divide(weights, _whole(visible), block_shape)
                    _add_product(weights, True, by_mixed, count, by_values, visible, size)
                    _multiply(by_mixed, False, turned_values, size, by_weights, count, visible)
                    _by_scores(weights, by_weights, mixed, by_mixed, scale, count, _whole(visible))
                    _multiply(weights, False, keys, visible, by_queries, count, size)
                    _add_product(weights, True, queries, count, by_keys, visible, size)
                    _put(by_queries, 0, count, by_rows, head, at)
            _scatter(by_keys, span, by_rows, heads + k)
            _scatter(by_values, span, by_rows, heads + kv_heads + k)


@njit
def _longest(spans: Integers) -> int:
    """Rows of the longest sequence with its prefix, up to a whole tile."""
    longest = 0
    for span in spans:
        longest = max(longest, _whole(span[1] + span[3]))
    return longest


@njit(inline="always")
def _whole(count: int) -> int:
    return -(-count // SMALL_COLUMNS) * SMALL_COLUMNS


@njit
def _room(rows: int, columns: int) -> Floats:
    return np.zeros((rows, columns), np.float32)


@njit
def _gather(rows: Floats, head: int, span: Integers, room: Floats) -> None:
    """What one head has of a sequence's prefix, and then of itself."""
    start, length, before, prefix = span
    _copy(rows, head, before, prefix, room, 0)
    _copy(rows, head, start, length, room, prefix)


@njit
def _scatter(room: Floats, span: Integers, rows: Floats, head: int) -> None:
    """Put what `_gather` would take to where it would take it from; to the prefix it is added."""
    start, length, before, prefix = span
    _add(room, prefix, rows, head, before)
    _put(room, prefix, length, rows, head, start)


@njit
def _copy(rows: Floats, head: int, first: int, count: int, room: Floats, place: int) -> None:  # noqa: PLR0917  compiled
    size = rows.shape[2]
    for i in range(count):
        source, target = rows[first + i, head], room[place + i, :size]
        for j in range(size):
            target[j] = source[j]


@njit
def _put(room: Floats, place: int, count: int, rows: Floats, head: int, first: int) -> None:  # noqa: PLR0917  compiled
    """The way back of `_copy`."""
    size = rows.shape[2]
    for i in range(count):
        source, target = room[place + i, :size], rows[first + i, head]
        for j in range(size):
            target[j] = source[j]


@njit
def _add(room: Floats, count: int, rows: Floats, head: int, first: int) -> None:
    size = rows.shape[2]
    for i in range(count):
        source, target = room[i, :size], rows[first + i, head]
        for j in range(size):
            target[j] += source[j]


@njit
def _clear(room: Floats, rows: int, columns: int) -> None:
    for i in range(rows):
        row = room[i, :columns]
        for j in range(len(row)):
            row[j] = 0


@njit
def _turn(room: Floats, count: int, turned: Floats) -> None:
    """The first rows as columns."""
    for t in range(count):
        for j in range(len(turned)):
            turned[j, t] = room[t, j]


@njit
def _multiply(x: Floats, turned: bool, right: Floats, steps: int, out: Floats, rows: int, columns: int) -> None:  # noqa: PLR0917  compiled
    """As `_add_product`, of what was there before nothing is left."""
    _products(x, turned, right, steps, out, rows, columns, False)


@njit
def _add_product(x: Floats, turned: bool, right: Floats, steps: int, out: Floats, rows: int, columns: int) -> None:  # noqa: PLR0917  compiled
    """Add `x @ right` to the first rows and columns of `out`, and to more of them, up to whole tiles.

    Args:
        x: [rows, steps], or [steps, rows] if it is `turned`, with room up to a multiple of `SMALL_ROWS` rows.
        right: [steps, columns], with room up to a multiple of `SMALL_COLUMNS`; at least one step.
        out: the result, with room for both.
    """
    _products(x, turned, right, steps, out, rows, columns, True)


@njit
def _products(  # noqa: PLR0917  compiled
    x: Floats, turned: bool, right: Floats, steps: int, out: Floats, rows: int, columns: int, adds: bool
) -> None:
    x_bytes, right_bytes, out_bytes = 4 * x.shape[1], 4 * right.shape[1], 4 * out.shape[1]
    x_row, x_step = (4, x_bytes) if turned else (x_bytes, 4)
    for step in range(0, steps, _STEPS):
        some = min(_STEPS, steps - step)
        for column in range(0, columns, SMALL_COLUMNS):
            factor = right.ctypes.data + step * right_bytes + 4 * column
            for row in range(0, rows, SMALL_ROWS):
                source = x.ctypes.data + row * x_row + step * x_step
                target = out.ctypes.data + row * out_bytes + 4 * column
                if adds or step:
                    add_small_tile(source, x_row, x_step, factor, right_bytes, some, target, out_bytes)
                else:
                    small_tile(source, x_row, x_step, factor, right_bytes, some, target, out_bytes)


@njit
def _measure(scores: Floats, before: int, shape: Floats) -> None:
    """The largest score of each query, of which the first sees `before` others than itself."""
    for i in range(len(shape)):
        shape[i, 0] = largest(scores[i, : before + i + 1])


@njit(fastmath=FAST)
def _weigh(scores: Floats, before: int, scale: np.float32, shape: Floats) -> None:
    """Replace scores by their exponentials, and those that a query does not see by 0, to the end of the last tile."""
    for i in range(len(shape)):
        peak, visible = shape[i, 0], before + i + 1
        seen = scores[i, : visible // LANES * LANES]
        for j in range(len(seen)):
            seen[j] = exponential((seen[j] - peak) * scale)
        left = np.int32(visible - len(seen))
        if left:
            part = scores[i, len(seen) : len(seen) + LANES]
            for j in range(LANES):
                weight = exponential((part[j] - peak) * scale)
                part[j] = weight if np.int32(j) < left else _ZERO
        hidden = scores[i, -(-visible // LANES) * LANES : _whole(before + len(shape))]
        for j in range(len(hidden)):
            hidden[j] = 0


@njit(fastmath=FAST)
def _by_scores(  # noqa: PLR0917  compiled
    weights: Floats, by_weights: Floats, mixed: Floats, by_mixed: Floats, scale: np.float32, count: int, columns: int
) -> None:
    """Replace weights by the gradient at the scores: each times what its own gradient is above the mean by all."""
    for i in range(count):
        one, other, mean = mixed[i], by_mixed[i], _ZERO
        for j in range(len(one)):
            mean += one[j] * other[j]
        weight, by_weight = weights[i, :columns], by_weights[i, :columns]
        for j in range(columns):
            weight[j] *= (by_weight[j] - mean) * scale


@njit(fastmath=FAST)
def _add_up(weights: Floats, columns: int, shape: Floats) -> None:
    for i in range(len(shape)):
        row, total = weights[i, :columns], _ZERO
        for j in range(len(row)):
            total += row[j]
        shape[i, 1] = total


@njit(fastmath=FAST)
def _divide(weights: Floats, columns: int, shape: Floats) -> None:
    for i in range(len(shape)):
        row, part = weights[i, :columns], _ONE / shape[i, 1]
        for j in range(len(row)):
            row[j] *= part
