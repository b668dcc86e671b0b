"""LLVM code for the vectors of this processor, and with it the innermost loops of matrix products.

Invariant: an element of a product is one chain of multiply-adds over the inner dimension, in its order, each of them
fused where the processor can.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (numba and llvmlite bring no types)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _lanes() -> int:
    features = get_host_cpu_features()
    if features.get("avx512f"):
        return 16
    return 8 if features.get("avx") else 4


LANES = _lanes()
"""Numbers in a vector."""
VECTOR_BYTES = 4 * LANES

NUMBER, INDEX, WORD = ir.FloatType(), ir.IntType(64), ir.IntType(32)
VECTOR, WORDS = ir.VectorType(NUMBER, LANES), ir.VectorType(WORD, LANES)
ZEROS = ir.Constant(VECTOR, [0.0] * LANES)

_ADDRESS = ir.IntType(8).as_pointer()


class Emitter:
    """Instructions that more than one loop needs; addresses are integers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def carry(self, values: Sequence[tuple[Any, Any, Any]], entry: Any, loop: Any) -> None:
        """What a loop carries from turn to turn: the phi of each value, how it begins, and what it becomes."""
        for phi, start, onward in values:
            phi.add_incoming(start, entry)
            phi.add_incoming(onward, loop)

    def index(self, number: int) -> Any:
        """A constant."""
        return ir.Constant(INDEX, number)

    def at(self, base: Any, offset: Any) -> Any:
        """The address `offset` bytes behind another."""
        return self.builder.add(base, offset)

    def load(self, address: Any) -> Any:
        """A vector."""
        vector = self.builder.load(self.builder.inttoptr(address, VECTOR.as_pointer()))
        vector.align = 4
        return vector

    def load_some(self, address: Any, count: Any, others: Any) -> Any:
        """A vector of which only `count` numbers are read, which may be none, and the rest is that of `others`."""
        places = ir.Constant(WORDS, list(range(LANES)))
        there = self.builder.icmp_signed("<", places, self.fill(self.builder.trunc(count, WORD)))
        kind = ir.FunctionType(VECTOR, [VECTOR.as_pointer(), WORD, there.type, VECTOR])
        load = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.masked.load.v{LANES}f32.p0")
        return self.builder.call(load, [self.builder.inttoptr(address, VECTOR.as_pointer()), WORD(4), there, others])

    def store(self, value: Any, address: Any) -> None:
        """Put a vector of any length somewhere."""
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = 4

    def spread(self, address: Any) -> Any:
        """The number at an address, in all places of a vector."""
        value = self.builder.load(self.builder.inttoptr(address, NUMBER.as_pointer()))
        value.align = 4
        return self.fill(value)

    def fill(self, value: Any) -> Any:
        """A value in all places of a vector."""
        undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        first = self.builder.insert_element(undefined, value, WORD(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(WORDS, [0] * LANES))

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """`a · b + c`, rounded once where the processor can."""
        kind = a.type
        name = "llvm.fmuladd.f32" if kind == NUMBER else f"llvm.fmuladd.v{kind.count}f32"
        function = cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(kind, [kind] * 3), name)
        return self.builder.call(function, [a, b, c])

    def fetch(self, address: Any) -> None:
        """Have a line of memory brought near, if it can be; any address will do."""
        kind = ir.FunctionType(ir.VoidType(), [_ADDRESS, WORD, WORD, WORD])
        prefetch = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        to_read, into_second_cache, as_data = WORD(0), WORD(2), WORD(1)
        place = self.builder.inttoptr(address, _ADDRESS)
        self.builder.call(prefetch, [place, to_read, into_second_cache, as_data])

    def larger(self, a: Any, b: Any) -> Any:
        """The larger in each place; that of `b` where `a` has no number."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def largest(self, vector: Any) -> Any:
        """The largest number of a vector."""
        kind = ir.FunctionType(NUMBER, [VECTOR])
        name = f"llvm.vector.reduce.fmax.v{LANES}f32"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [vector])

    def fold(self, vectors: Sequence[Any], width: int) -> Any:
        """The sum of each vector, in order, of which there are `width`, a power of two up to `LANES`."""
        count, parts = LANES, list(vectors)
        while len(parts) > 1:
            parts = [self._neighbours(a, b, count) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        (sums,) = parts
        while count > width:
            count //= 2
            sums = self._neighbours(sums, ir.Constant(sums.type, ir.Undefined), count)
        return sums

    def _neighbours(self, a: Any, b: Any, count: int) -> Any:
        """The sums of each two neighbours in `a` and then `b`, `count` of them."""
        even, odd = (ir.Constant(ir.VectorType(WORD, count), list(range(i, 2 * count, 2))) for i in (0, 1))
        return self.builder.fadd(self.builder.shuffle_vector(a, b, even), self.builder.shuffle_vector(a, b, odd))


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
