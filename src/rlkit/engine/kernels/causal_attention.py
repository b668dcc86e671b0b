"""Causal attention inside packed sequences and its gradient, compiled for this processor.

Invariant: a sequence's result depends only on its own rows, bit for bit, and the output of a row only on this row and
those before it, in a prefix or not. A later row that is not finite may affect earlier rows, because hidden positions
are multiplied by zero.

Each block of queries of a head is scored against all keys up to its last query. The backward pass recomputes scores and
weights from the largest score and the sum of weights of each query (Dao et al. 2022, with whole rows instead of the
online softmax), for a part of the keys at a time, which stays in the second-level cache. Factors are copied into
buffers of whole tiles, so products need no code for edges. After a sequence's last row, a buffer may hold rows of
another sequence; they only affect rows and columns that are never read.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportCallIssue=false
# (numba and llvmlite have no types, and an intrinsic is called without its first argument)

from __future__ import annotations

import numpy as np
from numba import njit

from rlkit.engine.kernels.cpu_kernels import Floats, Integers, exponential, row_max
from rlkit.engine.kernels.jit_cache import FASTMATH_FLAGS, jit_kernel
from rlkit.engine.kernels.llvm import LANES, SMALL_COLUMNS, SMALL_ROWS, add_small_tile, small_tile

# Queries in a block, a multiple of `SMALL_ROWS` on every processor. Blocks are short below `_LONG_TOKENS`, where much
# of a block would be hidden, and longer above it, where keys and values do not fit the cache.
_SHORT_BLOCK, _BLOCK, _LONG_TOKENS = 32, 64, 1024
_LINE = 32  # twice the numbers of a cache line, and a multiple of `SMALL_COLUMNS`
_KEYS = 256
_STEPS = 128  # rows of a factor that stay in the first-level cache

_ZERO, _ONE = np.float32(0), np.float32(1)


@jit_kernel(fast=True)
def attention(  # noqa: PLR0917  compiled
    rows: Floats,
    spans: Integers,
    kv_heads: int,
    window: int,
    first: int,
    last: int,
    prefix_rows: Floats,
    out: Floats,
    stats: Floats,
) -> None:
    """Compute causal attention for the query heads of some key heads (Vaswani et al. 2017, eq. 1).

    Args:
        rows: [N, H + 2K, D], queries, keys and values.
        spans: [S, 4], start and length of each sequence, then start and length of its prefix.
        window: the number of last positions, with itself, that a position attends to.
        first: the first key head, up to `last`, exclusive.
        prefix_rows: [M, at least 2K, D], whose last heads are the keys and values of prefixes; may be `rows`.
        out: [N, H, D], the result; rows of no span stay unchanged.
        stats: [N, H, 2], a second result: a query's largest score, and the sum of its weights.
    """
    size, heads = rows.shape[2], rows.shape[1] - 2 * kv_heads
    group = heads // kv_heads
    scale = _ONE / np.sqrt(np.float32(size))
    width, longest = _round_up(size), _longest(spans)
    keys, values, transposed = _zeros(longest, width), _zeros(longest, width), _zeros(size, longest)
    queries, mixed, weights = _zeros(_BLOCK, width), _zeros(_BLOCK, width), _zeros(_BLOCK, longest)
    for k in range(first, last):
        for span in spans:
            start, length, _, prefix = span
            _gather(rows, prefix_rows, 2 * kv_heads - k, span, 0, prefix + length, keys)
            _gather(rows, prefix_rows, kv_heads - k, span, 0, prefix + length, values)
            transposed[:, : prefix + length] = keys[: prefix + length, :size].T
            block = _SHORT_BLOCK if prefix + length < _LONG_TOKENS else _BLOCK
            for head in range(k * group, (k + 1) * group):
                for query in range(0, length, block):
                    first_row, count = start + query, min(block, length - query)
                    visible, block_stats = prefix + query + count, stats[first_row : first_row + count, head]
                    _read_rows(rows, head, first_row, count, queries, 0)
                    _multiply(queries, False, transposed, size, weights, count, visible, False)
                    _find_peaks(weights, prefix + query, window, block_stats)
                    _exponentiate(weights, prefix + query, window, visible, scale, block_stats)
                    _sum_weights(weights, prefix + query, block_stats)
                    _multiply(weights, False, values, visible, mixed, count, size, False)
                    _divide_by_sums(mixed, width, block_stats)
                    _write_rows(mixed, 0, count, out, head, first_row)


@jit_kernel(fast=True)
def attention_gradient(  # noqa: PLR0917  compiled
    rows: Floats,
    spans: Integers,
    kv_heads: int,
    window: int,
    first: int,
    last: int,
    out: Floats,
    stats: Floats,
    grad_out: Floats,
    grad_rows: Floats,
) -> None:
    """Compute the gradient at the `rows` of `attention` from the gradient at its `out`, `grad_out [N, H, D]`.

    Args:
        rows: as all arguments up to `last`, the argument of `attention`; `out` and `stats` are its results.
        grad_rows: [N, H + 2K, D], the result; rows of no span stay unchanged. A prefix precedes its continuations.
    """
    size, heads = rows.shape[2], rows.shape[1] - 2 * kv_heads
    group, scale = heads // kv_heads, _ONE / np.sqrt(np.float32(size))
    width, longest = _round_up(size), min(_longest(spans), _KEYS + _LINE + _LINE // 2)
    keys, transposed_keys, grad_keys = _zeros(longest, width), _zeros(size, longest), _zeros(longest, width)
    values, transposed_values, grad_values = _zeros(longest, width), _zeros(size, longest), _zeros(longest, width)
    queries, grad_queries, weights = _zeros(_BLOCK, width), _zeros(_BLOCK, width), _zeros(_BLOCK, longest)
    mixed, grad_mixed, grad_weights = _zeros(_BLOCK, width), _zeros(_BLOCK, width), _zeros(_BLOCK, longest)
    for k in range(first, last):
        for span in spans:
            start, length, _, prefix = span
            block = _SHORT_BLOCK if prefix + length < _LONG_TOKENS else _BLOCK
            for key in range(0, prefix + length, _KEYS):
                key_count = min(_KEYS, prefix + length - key)
                _gather(rows, rows, 2 * kv_heads - k, span, key, key_count, keys)
                _gather(rows, rows, kv_heads - k, span, key, key_count, values)
                transposed_keys[:, :key_count] = keys[:key_count, :size].T
                transposed_values[:, :key_count] = values[:key_count, :size].T
                grad_keys[:key_count] = grad_values[:key_count] = 0
                # The first part of the keys writes the gradients of all queries.
                end = min(key + key_count + window - prefix, length) if key else length
                for head in range(k * group, (k + 1) * group):
                    for query in range(max(key - prefix, 0) // block * block, end, block):
                        first_row, count = start + query, min(block, length - query)
                        before, block_stats = prefix + query - key, stats[first_row : first_row + count, head]
                        visible = min(before + count, key_count)
                        _read_rows(rows, head, first_row, count, queries, 0)
                        _read_rows(out, head, first_row, count, mixed, 0)
                        _read_rows(grad_out, head, first_row, count, grad_mixed, 0)
                        _multiply(queries, False, transposed_keys, size, weights, count, visible, False)
                        _exponentiate(weights, before, window, visible, scale, block_stats)
                        _divide_by_sums(weights, _round_up(visible), block_stats)
                        _multiply(weights, True, grad_mixed, count, grad_values, visible, size, True)
                        _multiply(grad_mixed, False, transposed_values, size, grad_weights, count, visible, False)
                        _score_gradient(weights, grad_weights, mixed, grad_mixed, scale, count, _round_up(visible))
                        _multiply(weights, False, keys, visible, grad_queries, count, size, False)
                        _multiply(weights, True, queries, count, grad_keys, visible, size, True)
                        if key:
                            _add_rows(grad_queries, count, grad_rows, head, first_row)
                        else:
                            _write_rows(grad_queries, 0, count, grad_rows, head, first_row)
                _scatter(grad_keys, span, key, key_count, grad_rows, heads + k)
                _scatter(grad_values, span, key, key_count, grad_rows, heads + kv_heads + k)


@njit
def _longest(spans: Integers) -> int:
    """Count the rows of the longest sequence with its prefix, rounded up to whole tiles.

    A row of so many numbers is an odd number of cache lines, so that the rows of a column use all sets of the cache.
    """
    longest = 0
    for span in spans:
        longest = max(longest, _round_up(span[1] + span[3]))
    return longest // _LINE * _LINE + _LINE + _LINE // 2


@njit(inline="always")
def _round_up(count: int) -> int:
    return -(-count // SMALL_COLUMNS) * SMALL_COLUMNS


@njit
def _zeros(rows: int, columns: int) -> Floats:
    return np.zeros((rows, columns), np.float32)


@njit
def _gather(  # noqa: PLR0917  compiled
    rows: Floats, prefix_rows: Floats, head: int, span: Integers, first: int, count: int, buffer: Floats
) -> None:
    """Copy one head, counted from the last, of some positions of a sequence after its prefix."""
    start, _, before, prefix = span
    shared = max(min(prefix - first, count), 0)
    _read_rows(prefix_rows, prefix_rows.shape[1] - head, before + first, shared, buffer, 0)
    _read_rows(rows, rows.shape[1] - head, start + first + shared - prefix, count - shared, buffer, shared)


@njit
def _scatter(buffer: Floats, span: Integers, first: int, count: int, rows: Floats, head: int) -> None:  # noqa: PLR0917  compiled
    """Write a buffer back to the rows that `_gather` reads; add to those of the prefix."""
    start, _, before, prefix = span
    shared = max(min(prefix - first, count), 0)
    _add_rows(buffer, shared, rows, head, before + first)
    _write_rows(buffer, shared, count - shared, rows, head, start + first + shared - prefix)


@njit
def _read_rows(rows: Floats, head: int, first: int, count: int, buffer: Floats, offset: int) -> None:  # noqa: PLR0917  compiled
    size = rows.shape[2]
    for i in range(count):
        source, target = rows[first + i, head], buffer[offset + i, :size]
        for j in range(size):
            target[j] = source[j]


@njit
def _write_rows(buffer: Floats, offset: int, count: int, rows: Floats, head: int, first: int) -> None:  # noqa: PLR0917  compiled
    size = rows.shape[2]
    for i in range(count):
        source, target = buffer[offset + i, :size], rows[first + i, head]
        for j in range(size):
            target[j] = source[j]


@njit
def _add_rows(buffer: Floats, count: int, rows: Floats, head: int, first: int) -> None:
    size = rows.shape[2]
    for i in range(count):
        source, target = buffer[i, :size], rows[first + i, head]
        for j in range(size):
            target[j] += source[j]


@njit
def _multiply(  # noqa: PLR0917  compiled
    x: Floats, transposed: bool, right: Floats, steps: int, out: Floats, rows: int, columns: int, adds: bool
) -> None:
    """Write `x @ right` to the first rows and columns of `out`, rounded up to whole tiles, or add it to them.

    Args:
        x: [rows, steps], or [steps, rows] if `transposed`, in a buffer of a multiple of `SMALL_ROWS` rows.
        right: [steps, columns], in a buffer of a multiple of `SMALL_COLUMNS` columns; at least one step.
    """
    x_bytes, right_bytes, out_bytes = 4 * x.shape[1], 4 * right.shape[1], 4 * out.shape[1]
    x_row, x_step = (4, x_bytes) if transposed else (x_bytes, 4)
    for step in range(0, steps, _STEPS):
        inner = min(_STEPS, steps - step)
        for column in range(0, columns, SMALL_COLUMNS):
            factor = right.ctypes.data + step * right_bytes + 4 * column
            for row in range(0, rows, SMALL_ROWS):
                source = x.ctypes.data + row * x_row + step * x_step
                target = out.ctypes.data + row * out_bytes + 4 * column
                if adds or step:
                    add_small_tile(source, x_row, x_step, factor, right_bytes, inner, target, out_bytes)
                else:
                    small_tile(source, x_row, x_step, factor, right_bytes, inner, target, out_bytes)


@njit
def _find_peaks(scores: Floats, before: int, window: int, stats: Floats) -> None:
    """Find the largest score of each query; `before` positions are before the first query."""
    for i in range(len(stats)):
        stats[i, 0] = row_max(scores[i, max(before + i + 1 - window, 0) : before + i + 1])


@njit(fastmath=FASTMATH_FLAGS)
def _exponentiate(  # noqa: PLR0917  compiled
    scores: Floats, before: int, window: int, columns: int, scale: np.float32, stats: Floats
) -> None:
    """Replace scores by their exponentials, and hidden ones by 0, to the end of the last tile of `columns`."""
    for i in range(len(stats)):
        peak, visible = stats[i, 0], min(max(before + i + 1, 0), columns)
        visible_scores = scores[i, : visible // LANES * LANES]
        for j in range(len(visible_scores)):
            visible_scores[j] = exponential((visible_scores[j] - peak) * scale)
        tail_count = np.int32(visible - len(visible_scores))
        if tail_count:
            tail = scores[i, len(visible_scores) : len(visible_scores) + LANES]
            for j in range(LANES):
                weight = exponential((tail[j] - peak) * scale)
                tail[j] = weight if np.int32(j) < tail_count else _ZERO
        hidden = scores[i, -(-visible // LANES) * LANES : _round_up(columns)]
        for j in range(len(hidden)):
            hidden[j] = 0
        for j in range(min(before + i + 1 - window, visible)):
            scores[i, j] = 0


@njit(fastmath=FASTMATH_FLAGS)
def _score_gradient(  # noqa: PLR0917  compiled
    weights: Floats,
    grad_weights: Floats,
    mixed: Floats,
    grad_mixed: Floats,
    scale: np.float32,
    count: int,
    columns: int,
) -> None:
    """Replace each weight w by the gradient at its score, w · (∂w − mean of ∂w weighted by w) · scale."""
    for i in range(count):
        out_row, grad_row, mean = mixed[i], grad_mixed[i], _ZERO
        for j in range(len(out_row)):
            mean += out_row[j] * grad_row[j]
        weight, grad_weight = weights[i, :columns], grad_weights[i, :columns]
        for j in range(columns):
            weight[j] *= (grad_weight[j] - mean) * scale


@njit(fastmath=FASTMATH_FLAGS)
def _sum_weights(weights: Floats, before: int, stats: Floats) -> None:
    """Sum the weights of each query, in an order that depends only on its position."""
    for i in range(len(stats)):
        row, total = weights[i, : _round_up(before + i + 1)], _ZERO
        for j in range(len(row)):
            total += row[j]
        stats[i, 1] = total


@njit(fastmath=FASTMATH_FLAGS)
def _divide_by_sums(weights: Floats, columns: int, stats: Floats) -> None:
    for i in range(len(stats)):
        row, factor = weights[i, :columns], _ONE / stats[i, 1]
        for j in range(len(row)):
            row[j] *= factor
