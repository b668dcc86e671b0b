"""Compiling a function for this processor, and keeping that for the next process.

Invariant: what is kept is used only with the sources that it was made of; where it cannot be kept or read, the function
is compiled anew, and nobody is told. Where nothing may be compiled at all, importing this raises a `UsageError`.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportUntypedBaseClass=false
# (numba brings no types, and its cache is made to be extended from within)

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core.caching import FunctionCache

from rlkit.errors import UsageError

if config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]  numba sets it while it loads
    raise UsageError("NUMBA_DISABLE_JIT is set, but the embedded engine computes with compiled kernels: unset it")

# What lets sums be split over the lanes of a vector; what is not finite stays so.
FAST = {"reassoc", "contract", "nsz", "arcp"}


def jit_kernel[**P](*, fast: bool = False) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Compile a function when it is first called; it holds no lock while it runs.

    Args:
        fast: sums may be in another order. What is used alone and within larger functions is computed in the order in
            which it is written: otherwise its bits would depend on where the compiler puts it.
    """

    def compile_later(function: Callable[P, None]) -> Callable[P, None]:
        dispatcher: Any = njit(nogil=True, error_model="numpy", fastmath=FAST if fast else False)(function)
        try:
            dispatcher._cache = _Kept(function)
        except RuntimeError:  # neither beside the file nor in the user's cache can anything be written
            return dispatcher
        return dispatcher

    return compile_later


class _Kept(FunctionCache):
    """Numba's, which knows of changes to the function's own file only, and lets a full disk fail the call."""

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), _sources())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a file that is cut off can fail in any way
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # a full disk
            super().save_overload(sig, data)


@cache
def _sources() -> str:
    """A hash of all that compiled functions are made of."""
    return sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()
