"""Attention of one new position to all positions up to it, compiled for this processor.

Invariant: the result depends only on the row's own positions and bucket, bit for bit; data in the bucket after the last
position has no effect.

It takes as long as reading the keys and values. Measurements showed no gain from prefetch instructions.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportCallIssue=false
# (numba and llvmlite have no types, and an intrinsic is called without its first argument)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils

from rlkit.engine.kernels.cpu_kernels import Floats, exponential, row_max
from rlkit.engine.kernels.jit_cache import jit_kernel
from rlkit.engine.kernels.llvm import LANES, VECTOR_BYTES, ZEROS, Emitter, make_intrinsic, make_product

# Positions scored at a time, and vectors of a head's values summed at a time.
_POSITIONS = 4
_VECTORS = 4


@make_intrinsic(types.void(types.UniTuple(types.intp, 5)))
def _score_keys(e: Emitter, numbers: Any) -> None:
    """Emit the products of a query with keys.

    The argument is a tuple of integers: addresses of q [D] and of keys [count, D], the bytes of a key, `count`, and the
    address of scores [count]; D is a multiple of `LANES`. Keys and scores are read and written up to a multiple of
    `_POSITIONS`.
    """
    q, keys, row_bytes, count, scores = cgutils.unpack_tuple(e.builder, numbers)

    def score(first: Any, _: Sequence[Any]) -> list[Any]:
        rows = [e.at(keys, e.builder.mul(e.at(first, e.index(i)), row_bytes)) for i in range(_POSITIONS)]

        def multiply_add(offset: Any, sums: Sequence[Any]) -> list[Any]:
            part = e.load(e.at(q, offset))
            return [e.fma(part, e.load(e.at(row, offset)), total) for row, total in zip(rows, sums, strict=True)]

        sums = e.loop(row_bytes, VECTOR_BYTES, [ZEROS] * _POSITIONS, multiply_add)
        e.store(e.sum_each(sums, _POSITIONS), e.at(scores, e.builder.mul(first, e.index(4))))
        return []

    e.loop(count, _POSITIONS, [], score)


# Sums of values, each times its weight.
_mix_several, _mix_one = make_product(1, _VECTORS), make_product(1, 1)


@jit_kernel(fast=True)
def attend(  # noqa: PLR0917  compiled
    row: Floats, keys: Floats, values: Floats, position: int, window: int, scores: Floats, out: Floats
) -> None:
    """Write the keys and values of a row's new position, and attend over the last `window` positions up to it.

    Args:
        row: [H + 2K, D], queries, keys and values of the new position.
        keys: [K, T, D], as `values`; T is a multiple of 4.
        scores: [T], scratch memory.
        out: [H · D], the result.
    """
    all_heads, size = row.shape
    kv_heads, tokens = keys.shape[:2]
    heads = all_heads - 2 * kv_heads
    group = heads // kv_heads
    scale = np.float32(1) / np.sqrt(np.float32(size))
    hidden = max(position + 1 - window, 0)
    start = hidden // _POSITIONS * _POSITIONS
    positions = position + 1 - start
    row_bytes = 4 * size
    vectorised = size // LANES // _VECTORS * _VECTORS * LANES
    scores = scores[: tokens - start]
    for k in range(kv_heads):
        keys[k, position] = row[heads + k]
        values[k, position] = row[heads + kv_heads + k]
        first_key, first_value = keys[k, start:].ctypes.data, values[k, start:].ctypes.data
        for head in range(k * group, (k + 1) * group):
            mixed = out[head * size : (head + 1) * size]
            if size % LANES:
                _multiply_any_size(keys[k, start : position + 1], row[head], scores)
            else:
                _score_keys((row[head].ctypes.data, first_key, row_bytes, positions, scores.ctypes.data))
            scores[: hidden - start] = -np.inf
            scores[positions:] = -np.inf
            _apply_softmax(scores, scale)
            if size % LANES:
                _multiply_any_size(values[k, start : position + 1].T, scores[:positions], mixed)
                continue
            for j in range(0, vectorised, _VECTORS * LANES):
                source, target = first_value + 4 * j, mixed.ctypes.data + 4 * j
                _mix_several(scores.ctypes.data, 0, 4, source, row_bytes, positions, target, 0)
            for j in range(vectorised, size, LANES):
                source, target = first_value + 4 * j, mixed.ctypes.data + 4 * j
                _mix_one(scores.ctypes.data, 0, 4, source, row_bytes, positions, target, 0)


@njit(inline="always")
def _apply_softmax(scores: Floats, scale: np.float32) -> None:
    """Replace scores by the softmax of `scale · scores`; `scale` is positive."""
    peak = row_max(scores)
    total = np.float32(0)
    for j in range(len(scores)):
        scores[j] = exponential((scores[j] - peak) * scale)
    for j in range(len(scores)):
        total += scores[j]
    for j in range(len(scores)):
        scores[j] /= total


@njit(inline="always")
def _multiply_any_size(matrix: Floats, vector: Floats, out: Floats) -> None:
    """Write the product of `matrix [n, m]` with `vector [m]` to the first numbers of `out`."""
    for i in range(len(matrix)):
        total = np.float32(0)
        for j in range(len(vector)):
            total += vector[j] * matrix[i, j]
        out[i] = total
