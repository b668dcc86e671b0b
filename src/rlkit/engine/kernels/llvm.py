"""Writing LLVM's instructions for the vectors of this processor."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (numba and llvmlite bring no types)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils


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
