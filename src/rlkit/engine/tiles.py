"""The innermost loop of a matrix product, written for the registers of this processor.

Invariant: an element is one chain of multiply-adds over the inner dimension, in its order, each of them fused where the
processor can.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (numba and llvmlite bring no types)

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from rlkit.engine.emitting import INDEX, LANES, VECTOR, VECTOR_BYTES, ZEROS, Emitter

# As many sums as stay in the registers, of which only the widest vectors have 32.
TILE_ROWS, _VECTORS = {16: (8, 3), 8: (4, 3), 4: (4, 4)}[LANES]
COLUMNS = _VECTORS * LANES
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
    e = Emitter(builder)
    entry, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    rows = [e.at(x, builder.mul(e.index(row), x_stride)) for row in range(TILE_ROWS)]
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(INDEX)
    sums = [[builder.phi(VECTOR) for _ in range(_VECTORS)] for _ in range(TILE_ROWS)]
    at_step = e.at(panel, builder.mul(step, e.index(PANEL_ROW_BYTES)))
    weights = [e.load(e.at(at_step, e.index(v * VECTOR_BYTES)), aligned=VECTOR_BYTES) for v in range(_VECTORS)]
    e.fetch(e.at(ahead, builder.mul(step, pace)))
    results: list[list[Any]] = []
    for row, row_sums in zip(rows, sums, strict=True):
        spread = e.spread(e.at(row, builder.mul(step, e.index(4))))
        results.append([e.fused(spread, weight, total) for weight, total in zip(weights, row_sums, strict=True)])
    following = builder.add(step, e.index(1))
    e.carry([(step, e.index(0), following)], entry, loop)
    for row_sums, row_results in zip(sums, results, strict=True):
        carried = zip(row_sums, row_results, strict=True)
        e.carry([(total, ZEROS, result) for total, result in carried], entry, loop)
    builder.cbranch(builder.icmp_signed("<", following, inner), loop, done)

    builder.position_at_end(done)
    for row, row_results in enumerate(results):
        row_out = e.at(out, builder.mul(e.index(row), out_stride))
        for v, result in enumerate(row_results):
            e.store(result, e.at(row_out, e.index(v * VECTOR_BYTES)))
    return context.get_dummy_value()
