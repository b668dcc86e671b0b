"""The innermost loop of a matrix product, written for the registers of this processor.

Invariant: an element is one chain of multiply-adds over the inner dimension, in its order, each of them fused where the
processor can.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (numba and llvmlite bring no types)

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _tile_shape() -> tuple[int, int, int]:
    """Rows, vectors in a row, and numbers in a vector, of what one tile keeps in registers."""
    features = get_host_cpu_features()
    if features.get("avx512f"):
        return 8, 3, 16
    return (4, 3, 8) if features.get("avx") else (4, 4, 4)


TILE_ROWS, _VECTORS, _LANES = _tile_shape()
COLUMNS = _VECTORS * _LANES
_VECTOR_BYTES = 4 * _LANES
PANEL_ROW_BYTES = 4 * COLUMNS


@intrinsic
def tile(  # noqa: PLR0917  what is emitted takes no keywords
    _context: Any, x: Any, x_stride: Any, panel: Any, inner: Any, out: Any, out_stride: Any, ahead: Any, pace: Any
) -> Any:
    """Emit the product of `TILE_ROWS` rows with one panel.

    All arguments are integers: addresses of x [TILE_ROWS, inner], the panel [inner, COLUMNS] and out [TILE_ROWS,
    COLUMNS], with the bytes between rows of x and of out; and where to fetch ahead from, `pace` bytes further at each
    step.
    """
    signature = types.void(*[types.intp] * 8)
    return signature, _emit_tile


def _emit_tile(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    x, x_stride, panel, inner, out, out_stride, ahead, pace = arguments
    number, index, word = ir.FloatType(), ir.IntType(64), ir.IntType(32)
    vector = ir.VectorType(number, _LANES)
    fused = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fmuladd.v{_LANES}f32"
    )
    address = ir.IntType(8).as_pointer()
    prefetch = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [address, word, word, word]), "llvm.prefetch.p0"
    )

    def at(base: Any, offset: Any, kind: Any) -> Any:
        return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

    entry, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    rows = [builder.add(x, builder.mul(index(row), x_stride)) for row in range(TILE_ROWS)]
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(index)
    sums = [[builder.phi(vector) for _ in range(_VECTORS)] for _ in range(TILE_ROWS)]
    at_step = builder.mul(step, index(PANEL_ROW_BYTES))
    weights = [builder.load(at(panel, builder.add(at_step, index(v * _VECTOR_BYTES)), vector)) for v in range(_VECTORS)]
    for weight in weights:
        weight.align = _VECTOR_BYTES
    to_read, into_second_cache, as_data = word(0), word(2), word(1)
    builder.call(prefetch, [at(ahead, builder.mul(step, pace), ir.IntType(8)), to_read, into_second_cache, as_data])
    results: list[list[Any]] = []
    for row, row_sums in zip(rows, sums, strict=True):
        value = builder.load(at(row, builder.mul(step, index(4)), number))
        value.align = 4
        undefined = ir.Constant(vector, ir.Undefined)
        everywhere = ir.Constant(ir.VectorType(word, _LANES), [0] * _LANES)
        spread = builder.shuffle_vector(builder.insert_element(undefined, value, word(0)), undefined, everywhere)
        results.append(
            [builder.call(fused, [spread, weight, total]) for weight, total in zip(weights, row_sums, strict=True)]
        )
    following = builder.add(step, index(1))
    step.add_incoming(index(0), entry)
    step.add_incoming(following, loop)
    for row_sums, row_results in zip(sums, results, strict=True):
        for total, result in zip(row_sums, row_results, strict=True):
            total.add_incoming(ir.Constant(vector, [0.0] * _LANES), entry)
            total.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", following, inner), loop, done)

    builder.position_at_end(done)
    for row, row_results in enumerate(results):
        for v, result in enumerate(row_results):
            offset = builder.add(builder.mul(index(row), out_stride), index(v * _VECTOR_BYTES))
            builder.store(result, at(out, offset, vector)).align = 4
    return context.get_dummy_value()
