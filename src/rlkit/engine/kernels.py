"""What the engine computes on a CPU, compiled for this processor.

Invariant: what is computed of a row depends on that row only, bit for bit; an element of a product is one chain of
multiply-adds over the inner dimension, in its order.

The product is for weights that are only read, and a few dozen rows, where libraries reach half of what the processor
can do, because they wait for memory. Weights lie in panels of as many columns as stay in registers for a few rows; a
panel is used for all rows while the next one is fetched (Goto and van de Geijn 2008, with the small factor inside).

The rest is what stands between the products. A decoding step has a thousand such operations, each of which costs torch
more for Python, cold caches and turns with the other lane than for arithmetic; one call here does a handful of them
and holds no lock.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportCallIssue=false
# (numba and llvmlite bring no types, and an intrinsic is called without its first argument)

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from rlkit.engine.compiling import compiled
from rlkit.engine.tiles import COLUMNS, PANEL_ROW_BYTES, TILE_ROWS, tile

type Floats = NDArray[np.float32]
type Doubles = NDArray[np.float64]
type Integers = NDArray[np.int64]

BLOCK = 64
"""Numbers that are summed together: so many sums at a time in a norm, and so many weights when a token is drawn."""

# So many rows of the left factor stay in the cache while every panel passes by.
_ROWS_AT_ONCE = 256


@compiled()
def multiply(x: Floats, panels: Floats, out: Floats, first: int, last: int) -> None:
    """Write columns of `x [N, K]` times a packed weight into `out [N, M]`.

    Args:
        x: N a multiple of `TILE_ROWS`; contiguous, as all of them.
        panels: [⌈M / COLUMNS⌉, K, COLUMNS], aligned to 64 bytes.
        out: the result.
        first: the first panel whose columns are written; up to `last`, which is not.
    """
    count, inner = x.shape
    columns = out.shape[1]
    narrow = np.empty((TILE_ROWS, COLUMNS), np.float32)
    bytes_in = 4 * inner
    panel_bytes = inner * PANEL_ROW_BYTES
    for start in range(0, count, _ROWS_AT_ONCE):
        blocks = min(_ROWS_AT_ONCE, count - start) // TILE_ROWS
        # Each block of rows fetches its share of the next panel.
        pace = PANEL_ROW_BYTES // blocks
        for p in range(first, last):
            panel = panels.ctypes.data + p * panel_bytes
            whole = (p + 1) * COLUMNS <= columns
            for block in range(blocks):
                row = start + block * TILE_ROWS
                ahead = panel + panel_bytes + block * (panel_bytes // blocks)
                source = x.ctypes.data + row * bytes_in
                if whole:
                    target = out.ctypes.data + 4 * (row * columns + p * COLUMNS)
                    tile(source, bytes_in, panel, inner, target, 4 * columns, ahead, pace)
                else:
                    tile(source, bytes_in, panel, inner, narrow.ctypes.data, PANEL_ROW_BYTES, ahead, pace)
                    for i in range(TILE_ROWS):
                        for j in range(columns - p * COLUMNS):
                            out[row + i, p * COLUMNS + j] = narrow[i, j]


_ZERO, _ONE, _INFINITE = np.float32(0), np.float32(1), np.float32(np.inf)
_HALF = np.float32(0.5)
_LOG2_E = np.float32(1.44269504)
# ln 2 in two parts, of which the first times a small integer is exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.0)
# 1/7! … 1/2!, moved a little so that the error is least over ±(ln 2)/2.
_EXP_7, _EXP_6, _EXP_5 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_EXP_4, _EXP_3, _EXP_2 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_EXPONENT_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)


@intrinsic
def _float_of_bits(_context: Any, _bits: Any) -> Any:
    def emit(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), emit


@njit(inline="always")
def _exp(x: np.float32) -> np.float32:
    """eˣ to within 2 units in the last place, or 5 in fast functions; 0 below −87.3 and ∞ above 88.

    The C library's takes one number at a time. This is Cephes' `expf` (Moshier 1989): 2ⁿ times a polynomial.
    """
    bounded = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(bounded * _LOG2_E + _HALF)
    r = bounded - n * _LN2_HIGH - n * _LN2_LOW
    series = ((((_EXP_7 * r + _EXP_6) * r + _EXP_5) * r + _EXP_4) * r + _EXP_3) * r + _EXP_2
    power = (series * r * r + r + _ONE) * _float_of_bits((np.int32(n) + _EXPONENT_BIAS) << _MANTISSA_BITS)
    if x < _LOWEST:
        return _ZERO
    if x > _HIGHEST:
        return _INFINITE
    return power if x == x else x  # noqa: PLR0124  not a number stays so


@compiled()
def norm(x: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    """Root-mean-square norm (Zhang and Sennrich 2019, eq. 4) of the rows of `x [N, E]`, times `weight [E]`."""
    width = x.shape[1]
    squares = np.empty(BLOCK, np.float32)
    for i in range(x.shape[0]):
        squares[:] = 0
        for start in range(0, width, BLOCK):
            for j in range(min(BLOCK, width - start)):
                squares[j] += x[i, start + j] * x[i, start + j]
        total = _ZERO
        for j in range(BLOCK):
            total += squares[j]
        scale = _ONE / np.sqrt(total / np.float32(width) + eps)
        for j in range(width):
            out[i, j] = x[i, j] * scale * weight[j]


@compiled(fast=True)
def norm_gradient(x: Floats, weight: Floats, eps: np.float32, by_out: Floats, by_x: Floats) -> None:
    """The gradient of `norm` at `x [N, E]` for one at its result, `by_out [N, E]`."""
    width = x.shape[1]
    for i in range(x.shape[0]):
        squares, along = np.float32(0), np.float32(0)
        for j in range(width):
            squares += x[i, j] * x[i, j]
            along += x[i, j] * by_out[i, j] * weight[j]
        scale = _ONE / np.sqrt(squares / np.float32(width) + eps)
        along *= scale * scale / np.float32(width)
        for j in range(width):
            by_x[i, j] = scale * (by_out[i, j] * weight[j] - along * x[i, j])


@compiled()
def gate(both: Floats, out: Floats) -> None:
    """SiLU of the first half of the columns of `both [N, 2I]`, times the second (Shazeer 2020), into `out [N, I]`."""
    count, width = out.shape
    for i in range(count):
        for j in range(width):
            gated = both[i, j]
            out[i, j] = gated / (_ONE + _exp(-gated)) * both[i, width + j]


@compiled(fast=True)
def gate_gradient(both: Floats, by_out: Floats, by_both: Floats) -> None:
    """The gradient of `gate` at `both [N, 2I]` for one at its result, `by_out [N, I]`."""
    count, width = by_out.shape
    for i in range(count):
        for j in range(width):
            gated, up = both[i, j], both[i, width + j]
            share = _ONE / (_ONE + _exp(-gated))
            by_both[i, j] = by_out[i, j] * up * share * (_ONE + gated * (_ONE - share))
            by_both[i, width + j] = by_out[i, j] * gated * share


@compiled()
def rotate(rows: Floats, heads: int, cos: Floats, sin: Floats, way: np.float32) -> None:
    """Rotary embedding (Su et al. 2021, halves convention), in place, of the first `heads` of `rows [N, …, D]`.

    Args:
        rows: [N, heads and perhaps others, D].
        heads: how many are rotated.
        cos: [N, D], and `sin` alike.
        way: 1, or −1 for the way back.
    """
    half = rows.shape[2] // 2
    for i in range(rows.shape[0]):
        for h in range(heads):
            for j in range(half):
                first, second = rows[i, h, j], rows[i, h, half + j]
                sine = way * sin[i, j]
                rows[i, h, j] = first * cos[i, j] - second * sine
                rows[i, h, half + j] = second * cos[i, j] + first * sine


@compiled(fast=True)
def attend(rows: Floats, keys: Floats, values: Floats, last: Integers, out: Floats) -> None:
    """Write the keys and values of one new position of each row and attend over all up to it.

    Args:
        rows: [N, H + 2K, D], queries, keys and values of the new positions.
        keys: [at least N, K, T, D], and `values` alike.
        last: [N], the new position of each row.
        out: [N, H · D], the result.
    """
    count, all_heads, size = rows.shape
    kv_heads = keys.shape[1]
    heads = all_heads - 2 * kv_heads
    group = heads // kv_heads
    scale = _ONE / np.sqrt(np.float32(size))
    weights = np.empty(keys.shape[2], np.float32)
    for i in range(count):
        positions = last[i] + 1
        for k in range(kv_heads):
            for j in range(size):
                keys[i, k, last[i], j] = rows[i, heads + k, j]
                values[i, k, last[i], j] = rows[i, heads + kv_heads + k, j]
            for h in range(k * group, (k + 1) * group):
                peak = np.float32(-np.inf)
                for t in range(positions):
                    score = np.float32(0)
                    for j in range(size):
                        score += rows[i, h, j] * keys[i, k, t, j]
                    weights[t] = score * scale
                    peak = max(peak, weights[t])
                total = np.float32(0)
                for t in range(positions):
                    weights[t] = _exp(weights[t] - peak)
                    total += weights[t]
                mixed = out[i, h * size : (h + 1) * size]
                mixed[:] = 0
                for t in range(positions):
                    weight = weights[t] / total
                    for j in range(size):
                        mixed[j] += weight * values[i, k, t, j]


@compiled(fast=True)
def choose(logits: Floats, uniforms: Doubles, tokens: Integers, normalisers: Doubles) -> None:
    """Draw a token of each row of `logits [N, V]` where the cumulative weight passes its uniform number.

    Args:
        logits: −∞ for what is never drawn.
        uniforms: [N], in [0, 1).
        tokens: [N], the result.
        normalisers: [N], the logarithm of the summed exponentials of each row.
    """
    vocab = logits.shape[1]
    blocks = -(-vocab // BLOCK)
    sums = np.empty(blocks, np.float64)
    peaks = np.empty(BLOCK, np.float32)
    for i in range(len(logits)):
        row = logits[i]
        peaks[:] = -np.inf
        for b in range(blocks):
            for j in range(min(BLOCK, vocab - b * BLOCK)):
                if row[b * BLOCK + j] > peaks[j]:  # noqa: PLR1730  the function would not be compiled to a vector's
                    peaks[j] = row[b * BLOCK + j]
        peak = peaks.max()
        total = 0.0
        for b in range(blocks):
            weight = _ZERO
            for j in range(min(BLOCK, vocab - b * BLOCK)):
                weight += _exp(row[b * BLOCK + j] - peak)
            sums[b] = weight
            total += sums[b]
        # Rounding may leave nothing above the aim: then it is the last token of positive weight.
        aim = uniforms[i] * total
        block, before, reached = 0, 0.0, 0.0
        for b in range(blocks):
            if sums[b] > 0:
                block, before = b, reached
                reached += sums[b]
                if reached > aim:
                    break
        token = block * BLOCK
        for j in range(token, min(token + BLOCK, vocab)):
            weight = _exp(row[j] - peak)
            if weight > 0:
                token = j
                before += weight
                if before > aim:
                    break
        tokens[i] = token
        normalisers[i] = peak + np.log(total)


class LayerArrays(NamedTuple):
    """A layer as the kernels take it: matrices are packed, and what there is not is an array without numbers.

    Args:
        eps: of its norms.
        attention_norm: [E].
        qkv: packed from [E, (H + 2K) · D].
        qkv_bias: [(H + 2K) · D].
        head_norms: [2, D], of a query's head and of a key's.
        o: packed from [H · D, E].
        o_bias: [E].
        mlp_norm: [E].
        gate_up: packed from [E, 2I].
        down: packed from [I, E].
    """

    eps: np.float32
    attention_norm: Floats
    qkv: Floats
    qkv_bias: Floats
    head_norms: Floats
    o: Floats
    o_bias: Floats
    mlp_norm: Floats
    gate_up: Floats
    down: Floats


@compiled()
def before_attention(layer: LayerArrays, x: Floats, kv_heads: int, rope: Floats, qkv: Floats) -> None:
    """Queries, keys and values of `x [N, E]`.

    Args:
        layer: its weights.
        x: the residual stream.
        kv_heads: K.
        rope: cosines and sines [2, N, D], or [0, N, D] where nothing is rotated.
        qkv: [N, H + 2K, D], the result.
    """
    count, heads, size = qkv.shape
    queries = heads - 2 * kv_heads
    normed = np.empty_like(x)
    norm(x, layer.attention_norm, layer.eps, normed)
    multiply(normed, layer.qkv, qkv.reshape(count, heads * size), 0, len(layer.qkv))
    for i in range(count):
        row = qkv[i].reshape(heads * size)
        for j in range(len(layer.qkv_bias)):
            row[j] += layer.qkv_bias[j]
        if len(layer.head_norms):
            q, k = qkv[i, :queries], qkv[i, queries : queries + kv_heads]
            norm(q, layer.head_norms[0], layer.eps, q)
            norm(k, layer.head_norms[1], layer.eps, k)
    if len(rope):
        rotate(qkv, heads - kv_heads, rope[0], rope[1], _ONE)


@compiled()
def after_attention(layer: LayerArrays, x: Floats, mixed: Floats) -> None:
    """Add to the residual stream `x [N, E]` what attention gave, of `mixed [N, H · D]`, and then the feed-forward."""
    added, normed = np.empty_like(x), np.empty_like(x)
    multiply(mixed, layer.o, added, 0, len(layer.o))
    x += added
    for i in range(len(x)):
        for j in range(len(layer.o_bias)):
            x[i, j] += layer.o_bias[j]
    norm(x, layer.mlp_norm, layer.eps, normed)
    inner = layer.down.shape[1]
    both, gated = np.empty((len(x), 2 * inner), np.float32), np.empty((len(x), inner), np.float32)
    multiply(normed, layer.gate_up, both, 0, len(layer.gate_up))
    gate(both, gated)
    multiply(gated, layer.down, added, 0, len(layer.down))
    x += added
