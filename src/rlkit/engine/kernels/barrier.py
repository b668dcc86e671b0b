"""Where threads in compiled code wait for each other.

They meet more than a hundred times in a decoding step, too often to be put to sleep and woken: they look at a number
until all have counted themselves, and leave the core to others after a while.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportCallIssue=false
# (numba and llvmlite bring no types, and an intrinsic is called without its first argument)

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

GIVEN_UP = 1 << 60
"""What the counter is set to so that everybody passes at all later meetings."""

# About a tenth of a millisecond: a thread that takes so long to come has lost its core.
_SPINS = 2000
_RELAX = {"x86_64": ("llvm.x86.sse2.pause",), "aarch64": ("llvm.aarch64.hint", 1), "arm64": ("llvm.aarch64.hint", 1)}
_WORD = ir.IntType(64)


@intrinsic
def _add(_context: Any, _address: Any, _value: Any) -> Any:
    def emit(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.intp(types.intp, types.intp), emit


@intrinsic
def _read(_context: Any, _address: Any) -> Any:
    def emit(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _WORD.as_pointer()), "seq_cst", 8)

    return types.intp(types.intp), emit


@intrinsic
def _relax(_context: Any) -> Any:
    """Tell the processor that nothing is gained by running ahead."""

    def emit(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if platform.machine() in _RELAX:
            name, *hints = _RELAX[platform.machine()]
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(hints))
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [ir.IntType(32)(h) for h in hints])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _leave_core(_context: Any) -> Any:
    """Let another thread run here, if there is one."""

    def emit(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        give_way = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield")
        builder.call(give_way, [])
        return context.get_dummy_value()

    return types.void(), emit


@njit(nogil=True)
def meet(counter: int, expected: int) -> None:
    """Count oneself, and wait until `expected` have been counted since the counter was 0.

    What each wrote before is seen by all afterwards.

    Args:
        counter: the address of an aligned int64.
        expected: as many as take part, times the meetings so far with this one.
    """
    if _add(counter, 1) >= expected - 1:
        return
    spins = 0
    while _read(counter) < expected:
        spins += 1
        if spins < _SPINS:
            _relax()
        else:
            _leave_core()
