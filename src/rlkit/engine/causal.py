"""Causal attention inside packed sequences, and its gradient, compiled for this processor.

Invariant: what is computed of a sequence depends on its own rows only, bit for bit.

Of each head a block of queries is held against all keys up to its last one. Nothing but the largest score and the sum
of the weights of each query is kept for the way back, where scores and weights are computed again (Dao et al. 2022,
with whole rows in place of the softmax that goes along). Factors are copied into rooms, filled up with zeros to whole
vectors, so that a tile of the product needs no ends.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportCallIssue=false
# (numba and llvmlite bring no types, and an intrinsic is called without its first argument)

from __future__ import annotations

import numpy as np
from numba import njit

from rlkit.engine.compiling import FAST, compiled
from rlkit.engine.emitting import LANES
from rlkit.engine.kernels import Floats, Integers, exponential, largest
from rlkit.engine.tiles import SMALL_COLUMNS, SMALL_ROWS, add_small_tile

QUERIES = 32  # a block of them, a multiple of `SMALL_ROWS` on every processor

_ZERO, _ONE = np.float32(0), np.float32(1)


@compiled(fast=True)
def attention(rows: Floats, spans: Integers, kv_heads: int, first: int, last: int, out: Floats, shape: Floats) -> None:  # noqa: PLR0917  compiled
    """Causal attention of the queries that belong to some of the key heads (Vaswani et al. 2017, eq. 1).

    Args:
        rows: [N, H + 2K, D], queries, keys and values.
        spans: [S, 4], of each sequence where it starts and its length, and of the prefix that it attends to as well.
        kv_heads: K.
        first: the first key head.
        last: the one behind the last.
        out: [N, H, D], the result; rows of no span are left alone.
        shape: [N, H, 2], a result too: a query's largest score, and what its weights are divided by.
    """
    count, size = last - first, rows.shape[2]
    heads = rows.shape[1] - 2 * kv_heads
    group = heads // kv_heads
    scale = _ONE / np.sqrt(np.float32(size))
    wide = _whole(size)
    longest, total = _longest(spans)
    queries, mixed = _room(count * group, longest, wide), _room(count * group, longest, wide)
    keys, values = _room(count, total, wide), _room(count, total, wide)
    shapes = _room(count * group, longest, 2)
    turned, weights = np.zeros((size, total), np.float32), np.zeros((QUERIES, total), np.float32)
    for span in spans:
        start, length, _, prefix = span
        _copy(rows, first * group, start, length, queries, 0)
        _gather(rows, heads + first, span, keys)
        _gather(rows, heads + kv_heads + first, span, values)
        for h in range(len(queries)):
            k = h // group
            if h % group == 0:
                _turn(keys[k], prefix + length, turned)
            for query in range(0, length, QUERIES):
                end, before = min(query + QUERIES, length), prefix + query
                visible, block_shape = prefix + end, shapes[h, query:end]
                _multiply(queries[h, query:], False, turned, size, weights, end - query, visible)
                _measure(weights, before, block_shape)
                _weigh(weights, before, scale, block_shape)
                _add_up(weights, _whole(visible), block_shape)
                _multiply(weights, False, values[k], visible, mixed[h, query:], end - query, size)
        for i in range(length):
            for h in range(len(queries)):
                target, source, divisor = out[start + i, first * group + h], mixed[h, i, :size], shapes[h, i, 1]
                for j in range(size):
                    target[j] = source[j] / divisor
                at = shape[start + i, first * group + h]
                at[0], at[1] = shapes[h, i, 0], divisor


@compiled(fast=True)
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
        rows: as they were given to `attention`, with all up to `last`.
        spans: likewise.
        kv_heads: likewise.
        first: likewise.
        last: likewise.
        out: what it found.
        shape: likewise.
        by_out: a gradient.
        by_rows: [N, H + 2K, D], the result; rows of no span are left alone. A prefix stands before what attends to it.
    """
    count, size = last - first, rows.shape[2]
    heads = rows.shape[1] - 2 * kv_heads
    group = heads // kv_heads
    scale = _ONE / np.sqrt(np.float32(size))
    wide = _whole(size)
    longest, total = _longest(spans)
    queries, by_queries = _room(count * group, longest, wide), _room(count * group, longest, wide)
    by_mixed, along = _room(count * group, longest, wide), np.empty((count * group, longest), np.float32)
    keys, by_keys = _room(count, total, wide), _room(count, total, wide)
    values, by_values = _room(count, total, wide), _room(count, total, wide)
    turned_keys, turned_values = np.zeros((size, total), np.float32), np.zeros((size, total), np.float32)
    weights, by_weights = np.zeros((QUERIES, total), np.float32), np.zeros((QUERIES, total), np.float32)
    for span in spans:
        start, length, _, prefix = span
        _copy(rows, first * group, start, length, queries, 0)
        _copy(by_out, first * group, start, length, by_mixed, 0)
        _gather(rows, heads + first, span, keys)
        _gather(rows, heads + kv_heads + first, span, values)
        for i in range(length):
            for h in range(len(queries)):
                one, other, dot = out[start + i, first * group + h], by_mixed[h, i, :size], _ZERO
                for j in range(size):
                    dot += one[j] * other[j]
                along[h, i] = dot
        for h in range(len(queries)):
            k = h // group
            if h % group == 0:
                _turn(keys[k], prefix + length, turned_keys)
                _turn(values[k], prefix + length, turned_values)
                _clear(by_keys[k], prefix + length)
                _clear(by_values[k], prefix + length)
            for query in range(0, length, QUERIES):
                end, before = min(query + QUERIES, length), prefix + query
                visible, columns = prefix + end, _whole(prefix + end)
                block_shape = shape[start + query : start + end, first * group + h]
                _multiply(queries[h, query:], False, turned_keys, size, weights, end - query, visible)
                _weigh(weights, before, scale, block_shape)
                _divide(weights, columns, block_shape)
                _add_product(weights, True, by_mixed[h, query:], end - query, by_values[k], visible, size)
                _multiply(by_mixed[h, query:], False, turned_values, size, by_weights, end - query, visible)
                # ∂ softmax: each weight times what its gradient is above the mean by all weights.
                for i in range(end - query):
                    weight, by_weight, mean = weights[i, :columns], by_weights[i, :columns], along[h, query + i]
                    for j in range(columns):
                        weight[j] *= (by_weight[j] - mean) * scale
                _multiply(weights, False, keys[k], visible, by_queries[h, query:], end - query, size)
                _add_product(weights, True, queries[h, query:], end - query, by_keys[k], visible, size)
        _put(by_queries, 0, length, by_rows, first * group, start)
        _scatter(by_keys, span, by_rows, heads + first)
        _scatter(by_values, span, by_rows, heads + kv_heads + first)


@njit
def _longest(spans: Integers) -> tuple[int, int]:
    """Rows of the longest sequence, and of the longest with its prefix, each up to a whole tile."""
    longest = total = 0
    for span in spans:
        longest, total = max(longest, _whole(span[1])), max(total, _whole(span[1] + span[3]))
    return longest, total


@njit(inline="always")
def _whole(count: int) -> int:
    return -(-count // SMALL_COLUMNS) * SMALL_COLUMNS


@njit
def _room(heads: int, rows: int, columns: int) -> Floats:
    return np.zeros((heads, rows, columns), np.float32)


@njit
def _gather(rows: Floats, head: int, span: Integers, room: Floats) -> None:
    """What some heads have of a sequence's prefix, and then of itself."""
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
    """Rows of as many heads as `room [heads, …]` has; row after row, as they lie in memory."""
    size = rows.shape[2]
    for i in range(count):
        for h in range(len(room)):
            source, target = rows[first + i, head + h], room[h, place + i, :size]
            for j in range(size):
                target[j] = source[j]


@njit
def _put(room: Floats, place: int, count: int, rows: Floats, head: int, first: int) -> None:  # noqa: PLR0917  compiled
    """The way back of `_copy`."""
    size = rows.shape[2]
    for i in range(count):
        for h in range(len(room)):
            source, target = room[h, place + i, :size], rows[first + i, head + h]
            for j in range(size):
                target[j] = source[j]


@njit
def _add(room: Floats, count: int, rows: Floats, head: int, first: int) -> None:
    size = rows.shape[2]
    for i in range(count):
        for h in range(len(room)):
            source, target = room[h, i, :size], rows[first + i, head + h]
            for j in range(size):
                target[j] += source[j]


@njit
def _clear(room: Floats, count: int) -> None:
    for i in range(count):
        row = room[i]
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
    for i in range(-(-rows // SMALL_ROWS) * SMALL_ROWS):
        row = out[i, : _whole(columns)]
        for j in range(len(row)):
            row[j] = 0
    _add_product(x, turned, right, steps, out, rows, columns)


@njit
def _add_product(x: Floats, turned: bool, right: Floats, steps: int, out: Floats, rows: int, columns: int) -> None:  # noqa: PLR0917  compiled
    """Add `x @ right` to the first rows and columns of `out`; all three have room up to whole tiles.

    Args:
        x: [rows, steps], or [steps, rows] if it is `turned`.
        turned: whether it is.
        right: [steps, columns].
        steps: how many are summed, at least 1.
        out: the result.
        rows: how many.
        columns: how many.
    """
    x_bytes, right_bytes, out_bytes = 4 * x.shape[1], 4 * right.shape[1], 4 * out.shape[1]
    x_row, x_step = (4, x_bytes) if turned else (x_bytes, 4)
    for column in range(0, columns, SMALL_COLUMNS):
        factor = right.ctypes.data + 4 * column
        for row in range(0, rows, SMALL_ROWS):
            target = out.ctypes.data + row * out_bytes + 4 * column
            add_small_tile(x.ctypes.data + row * x_row, x_row, x_step, factor, right_bytes, steps, target, out_bytes)


@njit
def _measure(scores: Floats, before: int, shape: Floats) -> None:
    """The largest score of each query, of which the first sees `before` others than itself."""
    for i in range(len(shape)):
        shape[i, 0] = largest(scores[i, : before + i + 1])


@njit(fastmath=FAST)
def _weigh(scores: Floats, before: int, scale: np.float32, shape: Floats) -> None:
    """Replace scores by their exponentials, and those that a query does not see by 0, to the end of the last vector."""
    for i in range(len(shape)):
        peak, visible = shape[i, 0], before + i + 1
        for start in range(0, visible, LANES):
            part, left = scores[i, start : start + LANES], np.int32(visible - start)
            for j in range(LANES):
                weight = exponential((part[j] - peak) * scale)
                part[j] = weight if np.int32(j) < left else _ZERO
        hidden = scores[i, -(-visible // LANES) * LANES : _whole(before + len(shape))]
        for j in range(len(hidden)):
            hidden[j] = 0


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
