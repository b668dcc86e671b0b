"""Compilation of functions for this processor, with a cache on the disk for the next process.

Invariant: a cached function is used only with the sources that it was compiled from; where the cache cannot be written
or read, the function is compiled again without a message. Where compiling is disabled, importing this raises a
`UsageError`.
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

# Allows sums to be split over the lanes of a vector; infinities and NaN keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}


def jit_kernel[**P](*, fast: bool = False) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Compile a function at its first call; it releases the interpreter's lock while it runs.

    Args:
        fast: allow sums in another order. Not for a function that is also called from larger ones: its bits would
            depend on where the compiler inlines it.
    """

    def decorate(function: Callable[P, None]) -> Callable[P, None]:
        dispatcher: Any = njit(nogil=True, error_model="numpy", fastmath=FAST if fast else False)(function)
        try:
            dispatcher._cache = _SourceCheckedCache(function)
        except RuntimeError:  # neither the source's folder nor the user's cache is writable
            return dispatcher
        return dispatcher

    return decorate


class _SourceCheckedCache(FunctionCache):
    """numba's cache, checked against all sources of this folder; a full disk fails no call."""

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), _hash_sources())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a truncated file can fail in any way
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # a full disk
            super().save_overload(sig, data)


@cache
def _hash_sources() -> str:
    """Hash all modules that compiled functions come from."""
    return sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()
