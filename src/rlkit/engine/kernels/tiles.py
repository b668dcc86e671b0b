"""The innermost loops of matrix products, written for the registers of this processor.

Invariant: an element is one chain of multiply-adds over the inner dimension, in its order, each of them fused where the
processor can.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (numba and llvmlite bring no types)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba import types
from numba.extending import intrinsic

from rlkit.engine.kernels.llvm import INDEX, LANES, VECTOR, VECTOR_BYTES, ZEROS, Emitter

# As many sums as stay in the registers, of which only the widest vectors have 32.
TILE_ROWS, _VECTORS = {16: (8, 3), 8: (4, 3), 4: (4, 4)}[LANES]
COLUMNS = _VECTORS * LANES
PANEL_ROW_BYTES = 4 * COLUMNS

# A smaller one, for products of a few dozen rows and columns, where a larger one would compute more that is not used.
SMALL_ROWS, _SMALL_VECTORS = {16: (8, 2), 8: (4, 2), 4: (4, 2)}[LANES]
SMALL_COLUMNS = _SMALL_VECTORS * LANES


@intrinsic
def tile(  # noqa: PLR0917  what is emitted takes no keywords
    _context: Any, x: Any, x_stride: Any, panel: Any, inner: Any, out: Any, out_stride: Any, ahead: Any, pace: Any
) -> Any:
    """Emit the product of `TILE_ROWS` rows with one panel.

    All arguments are integers: addresses of x [TILE_ROWS, inner], the panel [inner, COLUMNS] and out [TILE_ROWS,
    COLUMNS], with the bytes between rows of x and of out; and where to fetch ahead from, `pace` bytes further at each
    step.
    """

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        x, x_stride, panel, inner, out, out_stride, ahead, pace = arguments
        e = Emitter(builder)
        rows = _rows(e, x, x_stride, TILE_ROWS)
        begin = [[ZEROS] * _VECTORS for _ in rows]
        panel_row = e.index(PANEL_ROW_BYTES)
        results = _sums(e, rows, e.index(4), panel, panel_row, inner, begin, (ahead, pace))
        _store(e, results, _rows(e, out, out_stride, TILE_ROWS))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 8), emit


def _small(*, adds: bool) -> Any:
    @intrinsic
    def small(  # noqa: PLR0917  what is emitted takes no keywords
        _context: Any, x: Any, x_row: Any, x_step: Any, right: Any, right_row: Any, steps: Any, out: Any, out_row: Any
    ) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            x, x_row, x_step, right, right_row, steps, out, out_row = arguments
            e = Emitter(builder)
            targets = _rows(e, out, out_row, SMALL_ROWS)
            places = range(0, _SMALL_VECTORS * VECTOR_BYTES, VECTOR_BYTES)
            begin = [[e.load(e.at(row, e.index(place))) if adds else ZEROS for place in places] for row in targets]
            _store(e, _sums(e, _rows(e, x, x_row, SMALL_ROWS), x_step, right, right_row, steps, begin), targets)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), emit

    small.__doc__ = f"""Emit the product of x [SMALL_ROWS, steps] with right [steps, SMALL_COLUMNS], which out {
        "is increased by" if adds else "becomes"
    }.

    All arguments are integers: addresses, with the bytes between rows, and between the numbers in a row of x.
    """
    return small


small_tile, add_small_tile = _small(adds=False), _small(adds=True)


def _rows(e: Emitter, address: Any, row_bytes: Any, count: int) -> list[Any]:
    return [e.at(address, e.builder.mul(e.index(row), row_bytes)) for row in range(count)]


def _store(e: Emitter, results: Sequence[Sequence[Any]], rows: Sequence[Any]) -> None:
    for row, row_results in zip(rows, results, strict=True):
        for v, result in enumerate(row_results):
            e.store(result, e.at(row, e.index(v * VECTOR_BYTES)))


def _sums(  # noqa: PLR0917  values of the emitted code
    e: Emitter,
    rows: Sequence[Any],
    row_step: Any,
    right: Any,
    right_step: Any,
    steps: Any,
    begin: Sequence[Sequence[Any]],
    ahead: tuple[Any, Any] | None = None,
) -> list[list[Any]]:
    """Emit the loop over the inner dimension; what it adds to `begin`, for each row its vectors.

    Args:
        rows: the addresses of the left factor's rows, with `row_step` bytes between their numbers.
        right: the address of the right factor, whose rows are as many vectors, `right_step` bytes apart.
        steps: how many numbers are multiplied, at least 1.
        ahead: where to fetch ahead from, and how many bytes further at each step.
    """
    builder, entry = e.builder, e.builder.block
    loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(INDEX)
    sums = [[builder.phi(VECTOR) for _ in row] for row in begin]
    at_step = e.at(right, builder.mul(step, right_step))
    factors = [e.load(e.at(at_step, e.index(v * VECTOR_BYTES))) for v in range(len(begin[0]))]
    if ahead is not None:
        e.fetch(e.at(ahead[0], builder.mul(step, ahead[1])))
    results: list[list[Any]] = []
    for row, row_sums in zip(rows, sums, strict=True):
        spread = e.spread(e.at(row, builder.mul(step, row_step)))
        results.append([e.fused(spread, factor, total) for factor, total in zip(factors, row_sums, strict=True)])
    following = builder.add(step, e.index(1))
    e.carry([(step, e.index(0), following)], entry, loop)
    for row_sums, row_begin, row_results in zip(sums, begin, results, strict=True):
        e.carry(list(zip(row_sums, row_begin, row_results, strict=True)), entry, loop)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)

    builder.position_at_end(done)
    return results
