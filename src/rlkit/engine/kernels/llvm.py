"""LLVM code with this processor's vectors, and the innermost loops of matrix products.

Invariant: an element of a product is one chain of multiply-adds over the inner dimension, in its order; each of them is
fused if the processor supports it. It does not depend on the number of rows in a loop.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (numba and llvmlite have no types)

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import batched, chain, product
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FEATURES = get_host_cpu_features()

LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx") else 4
"""Numbers in a vector."""
VECTOR_BYTES = 4 * LANES

NUMBER, INDEX, WORD = ir.FloatType(), ir.IntType(64), ir.IntType(32)
VECTOR, WORDS = ir.VectorType(NUMBER, LANES), ir.VectorType(WORD, LANES)
ZEROS = ir.Constant(VECTOR, [0.0] * LANES)

_ADDRESS = ir.IntType(8).as_pointer()
# Instructions that look up a number of a vector for each of its places, by the low bits of an index.
_LOOKUPS = {"avx512f": "llvm.x86.avx512.permvar.sf.512", "avx2": "llvm.x86.avx2.permps"}
_LOOKUP = next((name for feature, name in _LOOKUPS.items() if _FEATURES.get(feature)), None)

FLOAT32, BFLOAT16, INT8, NF4 = range(4)  # kinds of stored numbers
NUMBER_BITS = (32, 16, 8, 4)
"""Bits of a number of each kind."""
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of NF4's codes (Dettmers et al. 2023, appendix E)."""


class Emitter:
    """Emitter of instructions used by several loops; addresses are integers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def loop(
        self, stop: Any, step: int, initial: Sequence[Any], body: Callable[[Any, Sequence[Any]], Sequence[Any]]
    ) -> Sequence[Any]:
        """Emit a loop over 0, `step`, … below `stop`; `body(index, values)` returns the next values, from `initial`."""
        builder, entry = self.builder, self.builder.block
        test, block, done = (builder.append_basic_block(name) for name in ("test", "block", "done"))
        builder.branch(test)

        builder.position_at_end(test)
        phis = [builder.phi(value.type) for value in (stop, *initial)]
        builder.cbranch(builder.icmp_signed("<", phis[0], stop), block, done)

        builder.position_at_end(block)
        carried = [builder.add(phis[0], self.index(step)), *body(phis[0], phis[1:])]
        for phi, start, value in zip(phis, (self.index(0), *initial), carried, strict=True):
            phi.add_incoming(start, entry)
            phi.add_incoming(value, builder.block)
        builder.branch(test)

        builder.position_at_end(done)
        return phis[1:]

    def call(self, name: str, kind: Any, *arguments: Any) -> Any:
        """Call a function of LLVM or of the C library by its name; `kind` is the type of its result."""
        function_type = ir.FunctionType(kind, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        return self.builder.call(function, arguments)

    def index(self, number: int) -> Any:
        """Return a constant of the index type."""
        return ir.Constant(INDEX, number)

    def at(self, base: Any, offset: Any) -> Any:
        """Compute the address `offset` bytes after `base`."""
        return self.builder.add(base, offset)

    def load(self, address: Any) -> Any:
        """Load a vector."""
        vector = self.builder.load(self.builder.inttoptr(address, VECTOR.as_pointer()))
        vector.align = 4
        return vector

    def load_numbers(self, address: Any, kind: int, shift: Any = None) -> Any:
        """Load a vector of numbers stored as `kind`, as float32 without scale; of pairs of NF4, those at a `shift`."""
        if kind == FLOAT32:
            return self.load(address)
        stored = ir.VectorType(ir.IntType(max(NUMBER_BITS[kind], 8)), LANES)
        vector = self.builder.load(self.builder.inttoptr(address, stored.as_pointer()))
        vector.align = max(NUMBER_BITS[kind] // 8, 1)
        if kind == INT8:
            return self.builder.sitofp(self.builder.sext(vector, WORDS), VECTOR)
        words = self.builder.zext(vector, WORDS)
        if kind == NF4:
            return self._look_up_nf4(self.builder.lshr(words, self.fill(self.builder.trunc(shift, WORD))))
        return self.builder.bitcast(self.builder.shl(words, ir.Constant(WORDS, [16] * LANES)), VECTOR)

    def _look_up_nf4(self, codes: Any) -> Any:
        """Look up the values of codes in the low bits; select by each bit that no instruction uses."""
        options, first_bit = [ir.Constant(VECTOR, [value] * LANES) for value in NF4_VALUES], 1
        if _LOOKUP is not None:
            tables = [ir.Constant(VECTOR, values) for values in batched(NF4_VALUES, LANES)]
            options, first_bit = [self.call(_LOOKUP, VECTOR, table, codes) for table in tables], LANES
        for bit in (bit for bit in (1, 2, 4, 8) if bit >= first_bit):
            bits = self.builder.and_(codes, ir.Constant(WORDS, [bit] * LANES))
            is_set = self.builder.icmp_unsigned("!=", bits, ir.Constant(WORDS, [0] * LANES))
            options = [self.builder.select(is_set, b, a) for a, b in zip(options[::2], options[1::2], strict=True)]
        return options[0]

    def load_some(self, address: Any, count: Any, others: Any) -> Any:
        """Load the first `count` numbers of a vector (may be 0); the remaining numbers are those of `others`."""
        places = ir.Constant(WORDS, list(range(LANES)))
        mask = self.builder.icmp_signed("<", places, self.fill(self.builder.trunc(count, WORD)))
        place = self.builder.inttoptr(address, VECTOR.as_pointer())
        return self.call(f"llvm.masked.load.v{LANES}f32.p0", VECTOR, place, WORD(4), mask, others)

    def store(self, value: Any, address: Any) -> None:
        """Store a vector of any length."""
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = 4

    def load_spread(self, address: Any) -> Any:
        """Load a number into all places of a vector."""
        value = self.builder.load(self.builder.inttoptr(address, NUMBER.as_pointer()))
        value.align = 4
        return self.fill(value)

    def fill(self, value: Any) -> Any:
        """Return a vector with one value in all places."""
        undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        first = self.builder.insert_element(undefined, value, WORD(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(WORDS, [0] * LANES))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Compute `a · b + c`, rounded once if the processor supports it."""
        name = "llvm.fmuladd.f32" if a.type == NUMBER else f"llvm.fmuladd.v{a.type.count}f32"
        return self.call(name, a.type, a, b, c)

    def prefetch(self, address: Any) -> None:
        """Prefetch a line of memory into the second-level cache; any address is allowed."""
        to_read, into_second_cache, as_data = WORD(0), WORD(2), WORD(1)
        place = self.builder.inttoptr(address, _ADDRESS)
        self.call("llvm.prefetch.p0", ir.VoidType(), place, to_read, into_second_cache, as_data)

    def maximum(self, a: Any, b: Any) -> Any:
        """Compute the larger number in each place; the number of `b` if that of `a` is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduce_max(self, vector: Any) -> Any:
        """Compute the largest number of a vector."""
        return self.call(f"llvm.vector.reduce.fmax.v{LANES}f32", NUMBER, vector)

    def sum_each(self, vectors: Sequence[Any], width: int) -> Any:
        """Sum the numbers of each of `width` vectors, a power of two up to `LANES`; return the sums in order."""
        count, parts = LANES, list(vectors)
        while len(parts) > 1:
            parts = [self._add_neighbours(a, b, count) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        (sums,) = parts
        while count > width:
            count //= 2
            sums = self._add_neighbours(sums, ir.Constant(sums.type, ir.Undefined), count)
        return sums

    def _add_neighbours(self, a: Any, b: Any, count: int) -> Any:
        """Add adjacent pairs in `a` and then `b`: `count` sums."""
        even, odd = (ir.Constant(ir.VectorType(WORD, count), list(range(i, 2 * count, 2))) for i in (0, 1))
        return self.builder.fadd(self.builder.shuffle_vector(a, b, even), self.builder.shuffle_vector(a, b, odd))


def make_intrinsic(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for compiled code from one that emits its instructions and returns the result, if there is one.

    What emits gets an `Emitter`, and then the values of the arguments.
    """

    def decorate(emit_body: Callable[..., Any]) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            result = emit_body(Emitter(builder), *arguments)
            return context.get_dummy_value() if result is None else result

        @intrinsic
        @wraps(emit_body)  # numba reads the names of its arguments
        def type_call(_context: Any, *_types: Any) -> Any:
            return signature, emit

        return type_call

    return decorate


# Number of sums kept in registers; only processors with the widest vectors have 32 registers.
TILE_ROWS, _VECTORS = {16: (8, 3), 8: (4, 3), 4: (4, 4)}[LANES]
COLUMNS = _VECTORS * LANES

# A smaller tile for products of a few dozen rows and columns; a large tile would mostly compute padding.
SMALL_ROWS, _SMALL_VECTORS = {16: (8, 2), 8: (4, 2), 4: (4, 2)}[LANES]
SMALL_COLUMNS = _SMALL_VECTORS * LANES


@make_intrinsic(types.void(types.UniTuple(types.intp, 14)))
def tile(e: Emitter, numbers: Any) -> None:
    """Emit the product of 1 or `TILE_ROWS` rows with one panel, plus a low-rank term.

    The argument is a tuple of integers: the count of rows and the kind of the panel's numbers; addresses of x
    [row_count, inner], the panel [inner, COLUMNS] and, for int8, its scales [COLUMNS]; `inner`; an address of out
    [row_count, COLUMNS], with the bytes between its rows; the address to prefetch, and the bytes by which it advances
    at each step; an address of low [row_count, rank] in float32, with the bytes between its rows; an address of its
    right factor [rank, COLUMNS] in float32; and the rank.

    Every sum continues with the low-rank term.
    """
    row_count, kind, *factors = cgutils.unpack_tuple(e.builder, numbers)
    for rows, number_kind in product((1, TILE_ROWS), (FLOAT32, BFLOAT16, INT8)):
        has_rows, has_kind = (
            e.builder.icmp_signed("==", value, e.index(constant))
            for value, constant in ((row_count, rows), (kind, number_kind))
        )
        with e.builder.if_then(e.builder.and_(has_rows, has_kind)):
            _emit_tile(e, rows, number_kind, factors)


@make_intrinsic(types.void(types.UniTuple(types.intp, 5)))
def widen_row(e: Emitter, numbers: Any) -> None:
    """Emit the widening of a panel's row to float32.

    The argument is a tuple of integers: the kind of its numbers, its address, the shift of a row of NF4 in its byte,
    the address of the scales [COLUMNS] of int8 and NF4, and that of the result [COLUMNS].
    """
    kind, source, shift, scales, target = cgutils.unpack_tuple(e.builder, numbers)
    for number_kind, bits in enumerate(NUMBER_BITS):
        with e.builder.if_then(e.builder.icmp_signed("==", kind, e.index(number_kind))):
            for v in range(_VECTORS):
                place = e.index(v * LANES * max(bits // 8, 1))
                vector = e.load_numbers(e.at(source, place), number_kind, shift)
                if number_kind in (INT8, NF4):
                    vector = e.builder.fmul(vector, e.load(e.at(scales, e.index(v * VECTOR_BYTES))))
                e.store(vector, e.at(target, e.index(v * VECTOR_BYTES)))


def _emit_tile(e: Emitter, row_count: int, kind: int, arguments: Sequence[Any]) -> None:
    x, panel, scales, inner, out, out_stride, prefetch, advance, low, low_stride, low_panel, rank = arguments
    number, row_bytes = e.index(4), e.index(NUMBER_BITS[kind] // 8 * COLUMNS)
    rows = _row_addresses(e, x, e.builder.mul(inner, number), row_count)
    zeros = [[ZEROS] * _VECTORS for _ in rows]
    sums = _multiply_add_loop(e, rows, number, panel, row_bytes, inner, zeros, (prefetch, advance), kind)
    if kind == INT8:
        factors = [e.load(e.at(scales, e.index(v * VECTOR_BYTES))) for v in range(_VECTORS)]
        sums = [[e.builder.fmul(*pair) for pair in zip(row_sums, factors, strict=True)] for row_sums in sums]
    low_rows = _row_addresses(e, low, low_stride, row_count)
    sums = _multiply_add_loop(e, low_rows, number, low_panel, e.index(4 * COLUMNS), rank, sums)
    _store_rows(e, sums, _row_addresses(e, out, out_stride, row_count))


def make_product(row_count: int, vectors: int, *, adds: bool = False) -> Any:
    """Make an emitter of the product of x [row_count, steps] with right [steps, vectors · LANES], written to out.

    All its arguments are integers: addresses, with the bytes between rows, and between the numbers in a row of x.

    Args:
        adds: add the product to out.
    """

    @make_intrinsic(types.void(*[types.intp] * 8))
    def emit_product(  # noqa: PLR0917  what is emitted takes no keywords
        e: Emitter, x: Any, x_row: Any, x_step: Any, right: Any, right_row: Any, steps: Any, out: Any, out_row: Any
    ) -> None:
        rows, targets = _row_addresses(e, x, x_row, row_count), _row_addresses(e, out, out_row, row_count)
        places = range(0, vectors * VECTOR_BYTES, VECTOR_BYTES)
        initial = [[e.load(e.at(row, e.index(place))) if adds else ZEROS for place in places] for row in targets]
        _store_rows(e, _multiply_add_loop(e, rows, x_step, right, right_row, steps, initial), targets)

    return emit_product


small_tile = make_product(SMALL_ROWS, _SMALL_VECTORS)
add_small_tile = make_product(SMALL_ROWS, _SMALL_VECTORS, adds=True)


def _row_addresses(e: Emitter, address: Any, row_bytes: Any, count: int) -> list[Any]:
    return [e.at(address, e.builder.mul(e.index(row), row_bytes)) for row in range(count)]


def _store_rows(e: Emitter, results: Sequence[Sequence[Any]], rows: Sequence[Any]) -> None:
    for row, row_results in zip(rows, results, strict=True):
        for v, result in enumerate(row_results):
            e.store(result, e.at(row, e.index(v * VECTOR_BYTES)))


def _multiply_add_loop(  # noqa: PLR0917  values of the emitted code
    e: Emitter,
    rows: Sequence[Any],
    row_step: Any,
    right: Any,
    right_step: Any,
    steps: Any,
    initial: Sequence[Sequence[Any]],
    prefetch: tuple[Any, Any] | None = None,
    kind: int = FLOAT32,
) -> Sequence[Sequence[Any]]:
    """Emit the loop over the inner dimension, which adds products to `initial`; return the vectors of each row.

    Args:
        rows: addresses of the left factor's rows, with `row_step` bytes between their numbers.
        right: address of the right factor, whose rows are `right_step` bytes apart.
        steps: length of the inner dimension.
        prefetch: the address to prefetch, and the bytes by which it advances at each step.
        kind: kind of the right factor's numbers.
    """

    def multiply_add(step: Any, sums: Sequence[Any]) -> list[Any]:
        at_step = e.at(right, e.builder.mul(step, right_step))
        factors = [e.load_numbers(e.at(at_step, e.index(v * vector_bytes)), kind) for v in range(width)]
        if prefetch is not None:
            e.prefetch(e.at(prefetch[0], e.builder.mul(step, prefetch[1])))
        spreads = (e.load_spread(e.at(row, e.builder.mul(step, row_step))) for row in rows)
        products = ((spread, factor) for spread in spreads for factor in factors)
        return [e.fma(*product, total) for product, total in zip(products, sums, strict=True)]

    width, vector_bytes = len(initial[0]), LANES * NUMBER_BITS[kind] // 8
    return list(batched(e.loop(steps, 1, list(chain(*initial)), multiply_add), width))
