"""CPU kernels of a layer: packed products, norms, the gate, rotary embedding, softmax, drawing tokens.

Invariant: a row's result depends only on that row, bit for bit; an element of a product is one chain of multiply-adds
over the inner dimension, in its order.

The product is for read-only weights and a few dozen rows, where libraries wait for memory and reach half of the
processor's speed. Weights are stored in panels, whose columns stay in registers for a few rows. All rows use a panel
while the next panel is prefetched (Goto and van de Geijn 2008, with the small factor inside).

Loops run over a slice, from 0. With a computed index the compiler must assume that it can be negative, and does not
vectorise.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportCallIssue=false
# (numba and llvmlite have no types, and an intrinsic is called without its first argument)

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types  # pyright: ignore[reportPrivateImportUsage]  documented as numba's
from numpy.typing import NDArray

from rlkit.engine.kernels.jit_cache import jit_kernel
from rlkit.engine.kernels.llvm import (
    COLUMNS,
    FLOAT32,
    INDEX,
    LANES,
    NF4,
    NUMBER,
    NUMBER_BITS,
    TILE_ROWS,
    VECTOR,
    Emitter,
    make_intrinsic,
    tile,
    widen_row,
)

type Floats = NDArray[np.float32]
type Doubles = NDArray[np.float64]
type Integers = NDArray[np.int64]

BLOCK = 64
"""Numbers in a partial sum: of the squares in a norm, and of the weights when a token is drawn."""

# Rows of the left factor that stay in the cache for all panels.
_ROWS_AT_ONCE = 256


def _make_pointer(kind: Any, stored: Any) -> Any:
    @make_intrinsic(types.CPointer(kind)(types.intp))
    def pointer(e: Emitter, address: Any) -> Any:
        return e.builder.inttoptr(address, stored.as_pointer())

    return pointer


floats_at = _make_pointer(types.float32, NUMBER)
"""Return the pointer to numbers at an address."""
_integers_at = _make_pointer(types.intp, INDEX)

MATRIX_FIELDS = ("panels", "kind", "scales", "low_panels", "low_spans", "rank")
"""Fields of a packed matrix in compiled code, an array of integers.

`panels` is an address, `kind` the kind of the numbers, and `scales` the address of their scales: float32 [panels, 1,
COLUMNS] for int8, [panels, ⌈in / NF4_BLOCK⌉, COLUMNS] for NF4. For a low-rank term, `low_panels` is the address of its
right factor in float32, `rank` the number of rows of that factor, and `low_spans` the address of int64 [panels, 2]: the
first of these rows that is not zero in a panel, and their number. Without a low-rank term the three are 0.
"""
PANELS, KIND, _SCALES, _LOW_PANELS, _LOW_SPANS, RANK = range(len(MATRIX_FIELDS))


@njit(inline="always")
def row_size(kind: int) -> int:
    """Return the bytes of a panel's row."""
    return COLUMNS * NUMBER_BITS[kind] // 8


NF4_BLOCK = 64
"""Numbers of a column with a common scale."""


@njit(inline="always")
def _widen(matrix: Integers, inner: int, p: int, target: int, row_bytes: int) -> None:
    """Write panel p, without low-rank term, to rows of float32 [COLUMNS] from an address."""
    kind = matrix[KIND]
    panel = matrix[PANELS] + p * inner * row_size(kind)
    blocks = -(-inner // NF4_BLOCK) if kind == NF4 else 1
    for k in range(inner):
        pair, shift = (k // 2, 4 * (k % 2)) if kind == NF4 else (k, 0)
        scales = matrix[_SCALES] + 4 * COLUMNS * (p * blocks + (k // NF4_BLOCK if kind == NF4 else 0))
        source = panel + pair * (COLUMNS if kind == NF4 else row_size(kind))
        widen_row((kind, source, shift, scales, target + k * row_bytes))


@jit_kernel()
def multiply_packed(  # noqa: PLR0917  compiled
    x: Floats, matrix: Integers, low: Floats, out: Floats, first: int, last: int, next_address: int
) -> None:
    """Write columns of `x [N, K]` times a packed matrix into `out [N, M]`, all of them contiguous.

    Args:
        x: N is 1 or a multiple of `TILE_ROWS`.
        matrix: see `MATRIX_FIELDS`; panels [⌈M / COLUMNS⌉, K, COLUMNS], or half as many bytes for NF4.
        low: [N, rank], the product of x and the left factor of the low-rank term.
        first: the first panel whose columns are written, up to `last`, exclusive.
        next_address: memory that this thread reads next, to prefetch it; any address is allowed.
    """
    count, inner = x.shape
    columns, rank, kind = out.shape[1], matrix[RANK], matrix[KIND]
    rows = TILE_ROWS if count > 1 else 1
    wide = np.empty((inner if kind == NF4 else 0, COLUMNS), np.float32)
    narrow = np.empty((TILE_ROWS, COLUMNS), np.float32)
    panel_bytes = inner * row_size(kind)
    spans = carray(_integers_at(matrix[_LOW_SPANS]), (last if rank else 0, 2))
    for start in range(0, count, _ROWS_AT_ONCE):
        blocks = min(_ROWS_AT_ONCE, count - start) // rows
        # Each block of rows prefetches its share of the next panel.
        advance = row_size(kind) // blocks
        for p in range(first, last):
            panel = following = matrix[PANELS] + p * panel_bytes
            if kind == NF4:
                _widen(matrix, inner, p, wide.ctypes.data, 4 * COLUMNS)
                panel = wide.ctypes.data
            is_whole = (p + 1) * COLUMNS <= columns
            low_first, low_rows = (spans[p, 0], spans[p, 1]) if rank else (0, 0)
            low_panel = matrix[_LOW_PANELS] + 4 * COLUMNS * (p * rank + low_first)
            for block in range(blocks):
                row = start + block * rows
                next_panel = following + panel_bytes if p + 1 < last else next_address
                prefetch = next_panel + block * (panel_bytes // blocks)
                source, low_source = x.ctypes.data + 4 * row * inner, low.ctypes.data + 4 * (row * rank + low_first)
                target, stride = out.ctypes.data + 4 * (row * columns + p * COLUMNS), 4 * columns
                if not is_whole:
                    target, stride = narrow.ctypes.data, 4 * COLUMNS
                factors = (source, panel, matrix[_SCALES] + 4 * COLUMNS * p, inner, target, stride, prefetch, advance)
                tile((rows, FLOAT32 if kind == NF4 else kind, *factors, low_source, 4 * rank, low_panel, low_rows))
                if not is_whole:
                    for i in range(rows):
                        for j in range(columns - p * COLUMNS):
                            out[row + i, p * COLUMNS + j] = narrow[i, j]


@jit_kernel()
def unpack(matrix: Integers, first: int, out: Floats) -> None:
    """Write whole panels of a packed matrix, from panel `first`, as columns of `out [K, panels · COLUMNS]`."""
    inner, columns = out.shape
    for p in range(columns // COLUMNS):
        _widen(matrix, inner, first + p, out.ctypes.data + 4 * p * COLUMNS, 4 * columns)


_ZERO, _ONE, _INFINITE = np.float32(0), np.float32(1), np.float32(np.inf)
_HALF, _LOG2_E = np.float32(0.5), np.float32(1.44269504)
# −ln 2 in two parts; the product of the first part and a small integer is exact.
_LN2_HIGH, _LN2_LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.0)
# 1/7! … 1/2!, adjusted to minimise the error over ±(ln 2)/2.
_EXP_7, _EXP_6, _EXP_5 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_EXP_4, _EXP_3, _EXP_2 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_EXPONENT_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)
# The approximation of GELU by tanh (Hendrycks and Gimpel 2016) is x · sigmoid(GELU_LINEAR · x + GELU_CUBIC · x³).
GELU_LINEAR, GELU_CUBIC = (c * math.sqrt(8 / math.pi) for c in (1, 0.044715))
_LINEAR, _CUBIC, _SLOPE_CUBIC = map(np.float32, (GELU_LINEAR, GELU_CUBIC, 3 * GELU_CUBIC))


@make_intrinsic(types.float32(*[types.float32] * 3))
def _fused(e: Emitter, a: Any, b: Any, c: Any) -> Any:
    """Compute `a · b + c`, rounded once if the processor supports it."""
    return e.fma(a, b, c)


@make_intrinsic(types.float32(types.int32))
def _float_of_bits(e: Emitter, bits: Any) -> Any:
    return e.builder.bitcast(bits, NUMBER)


@njit(inline="always")
def exponential(x: np.float32) -> np.float32:
    """Compute eˣ to within 2 units in the last place; 0 below −87.3 and ∞ above 88.

    The C library's function takes one number at a time. This is Cephes' `expf` (Moshier 1989): 2ⁿ times a polynomial.
    """
    bounded = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(_fused(bounded, _LOG2_E, _HALF))
    r = _fused(n, _LN2_LOW, _fused(n, _LN2_HIGH, bounded))
    series = _fused(_fused(_fused(_EXP_7, r, _EXP_6), r, _EXP_5), r, _EXP_4)
    series = _fused(_fused(series, r, _EXP_3), r, _EXP_2)
    power = (_fused(series, r * r, r) + _ONE) * _float_of_bits((np.int32(n) + _EXPONENT_BIAS) << _MANTISSA_BITS)
    if x < _LOWEST:
        return _ZERO
    if x > _HIGHEST:
        return _INFINITE
    return power if x == x else x  # noqa: PLR0124  NaN stays NaN


@jit_kernel()
def rms_norm(x: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    """Divide rows of `x [N, E]` by their root mean square (Zhang and Sennrich 2019, eq. 4), times `weight [E]`."""
    width = x.shape[1]
    squares = np.empty(BLOCK, np.float32)
    for i in range(x.shape[0]):
        row, result = x[i], out[i]
        for j in range(BLOCK):
            squares[j] = 0
        for start in range(0, width, BLOCK):
            block = row[start : start + BLOCK]
            for j in range(len(block)):
                squares[j] += block[j] * block[j]
        total = _ZERO
        for j in range(BLOCK):
            total += squares[j]
        scale = _ONE / np.sqrt(total / np.float32(width) + eps)
        for j in range(width):
            result[j] = row[j] * scale * weight[j]


@jit_kernel(fast=True)
def rms_norm_gradient(x: Floats, weight: Floats, eps: np.float32, grad_out: Floats, grad_x: Floats) -> None:
    """Compute the gradient at the `x [N, E]` of `rms_norm` from the gradient at its result, `grad_out [N, E]`."""
    width = x.shape[1]
    for i in range(x.shape[0]):
        row, grad_row, result = x[i], grad_out[i], grad_x[i]
        squares, projection = np.float32(0), np.float32(0)
        for j in range(width):
            squares += row[j] * row[j]
            projection += row[j] * grad_row[j] * weight[j]
        scale = _ONE / np.sqrt(squares / np.float32(width) + eps)
        projection *= scale * scale / np.float32(width)
        for j in range(width):
            result[j] = scale * (grad_row[j] * weight[j] - projection * row[j])


@jit_kernel()
def glu(both: Floats, out: Floats, first: int, last: int, is_gelu: bool) -> None:
    """Write a gated linear unit (Shazeer 2020) of `both [N, 2I]`, gates and their factors, to `out [N, I]`.

    Only the columns from `first` to `last`, exclusive, are written. The activation of the gates is SiLU or GELU.
    """
    count, width = out.shape
    for i in range(count):
        gates, ups, result = both[i, first:last], both[i, width + first : width + last], out[i, first:last]
        for j in range(len(result)):
            argument = gates[j] * (_LINEAR + _CUBIC * gates[j] * gates[j]) if is_gelu else gates[j]
            result[j] = gates[j] / (_ONE + exponential(-argument)) * ups[j]


@jit_kernel(fast=True)
def glu_gradient(both: Floats, grad_out: Floats, grad_both: Floats, is_gelu: bool) -> None:
    """Compute the gradient at the `both` of `glu` from the gradient at its result, and recompute the result.

    Args:
        grad_out: [N, I], overwritten with the result.
        grad_both: [N, 2I], the gradient.
    """
    count, width = grad_out.shape
    for i in range(count):
        gates, ups, row = both[i, :width], both[i, width:], grad_out[i]
        grad_gates, grad_ups = grad_both[i, :width], grad_both[i, width:]
        if is_gelu:  # a loop of its own, so that the sums of the other keep their order
            for j in range(width):
                gate = gates[j]
                sigmoid = _ONE / (_ONE + exponential(-gate * (_LINEAR + _CUBIC * gate * gate)))
                slope = gate * (_LINEAR + _SLOPE_CUBIC * gate * gate)
                grad_gates[j] = row[j] * ups[j] * sigmoid * (_ONE + slope * (_ONE - sigmoid))
                grad_ups[j] = row[j] * gate * sigmoid
                row[j] = gate * sigmoid * ups[j]
            continue
        for j in range(width):
            sigmoid = _ONE / (_ONE + exponential(-gates[j]))
            grad_gates[j] = row[j] * ups[j] * sigmoid * (_ONE + gates[j] * (_ONE - sigmoid))
            grad_ups[j] = row[j] * gates[j] * sigmoid
            row[j] = gates[j] * sigmoid * ups[j]


@jit_kernel()
def rotate(rows: Floats, heads: int, cos: Floats, sin: Floats, direction: np.float32) -> None:
    """Apply the rotary embedding (Su et al. 2021, halves convention) to the first `heads` of `rows`, in place.

    Args:
        rows: [N, at least `heads`, D].
        cos: [N, D], as `sin`.
        direction: 1, or −1 for the inverse.
    """
    half = rows.shape[2] // 2
    for i in range(rows.shape[0]):
        cosines, sines = cos[i, :half], sin[i, :half]
        for h in range(heads):
            first, second = rows[i, h, :half], rows[i, h, half:]
            for j in range(len(first)):
                a, b = first[j], second[j]
                first[j] = a * cosines[j] - b * (direction * sines[j])
                second[j] = b * cosines[j] + a * (direction * sines[j])


@njit(inline="always")
def row_max(row: Floats) -> np.float32:
    """Return the largest number of `row [n]`, contiguous; −∞ if it is empty."""
    return _reduce_max(row.ctypes.data, len(row))


@make_intrinsic(types.float32(types.intp, types.intp))
def _reduce_max(e: Emitter, numbers: Any, count: Any) -> Any:
    """Emit a vectorised maximum of `count` numbers at an address; the compiler would compare one at a time."""
    whole = e.builder.and_(count, e.index(-LANES))
    lowest = ir.Constant(VECTOR, [-np.inf] * LANES)

    def compare(start: Any, maxima: Sequence[Any]) -> list[Any]:
        return [e.maximum(e.load(e.at(numbers, e.builder.mul(start, e.index(4)))), maxima[0])]

    (before,) = e.loop(whole, LANES, [lowest], compare)
    last = e.load_some(e.at(numbers, e.builder.mul(whole, e.index(4))), e.builder.sub(count, whole), lowest)
    return e.reduce_max(e.maximum(last, before))


@jit_kernel(fast=True)
def exponentiate_rows(rows: Floats, peaks: Floats, sums: Floats) -> None:
    """Replace `rows [N, V]` by the exponentials of their differences to the row's largest number.

    Args:
        peaks: [N], a result: the largest number of each row.
        sums: [N], a result: the sum of each row's exponentials.
    """
    for i in range(len(rows)):
        row = rows[i]
        peak = row_max(row)
        total = 0.0
        for start in range(0, len(row), BLOCK):
            block = row[start : start + BLOCK]
            for j in range(len(block)):
                block[j] = exponential(block[j] - peak)
            weight = _ZERO
            for j in range(len(block)):
                weight += block[j]
            total += weight
        peaks[i], sums[i] = peak, total


@jit_kernel(fast=True)
def draw_tokens(logits: Floats, uniforms: Doubles, tokens: Integers, normalisers: Doubles) -> None:
    """Draw a token of each row of `logits [N, V]` where the cumulative weight passes its uniform number.

    Args:
        logits: −∞ for tokens that are never drawn.
        uniforms: [N], in [0, 1).
        tokens: [N], the result.
        normalisers: [N], a result: the logarithm of each row's summed exponentials.
    """
    vocab = logits.shape[1]
    blocks = -(-vocab // BLOCK)
    sums = np.empty(blocks, np.float64)
    for i in range(len(logits)):
        row = logits[i]
        peak = row_max(row)
        total = 0.0
        for b in range(blocks):
            block = row[b * BLOCK : (b + 1) * BLOCK]
            weight = _ZERO
            for j in range(len(block)):
                weight += exponential(block[j] - peak)
            sums[b] = weight
            total += sums[b]
        # If rounding leaves no cumulative weight above the target, the last token of positive weight is drawn.
        target = uniforms[i] * total
        block, before, cumulative = 0, 0.0, 0.0
        for b in range(blocks):
            if sums[b] > 0:
                block, before = b, cumulative
                cumulative += sums[b]
                if cumulative > target:
                    break
        token = block * BLOCK
        for j in range(token, min(token + BLOCK, vocab)):
            weight = exponential(row[j] - peak)
            if weight > 0:
                token = j
                before += weight
                if before > target:
                    break
        tokens[i] = token
        normalisers[i] = peak + np.log(total)
