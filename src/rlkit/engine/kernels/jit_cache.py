"""Just-in-time compilation with numba, and a cache of compiled functions on the disk.

Invariant: a cached function is used only with the sources that it was compiled from. If the cache cannot be written or
read, the function is compiled again, without a message.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportUntypedBaseClass=false
# (numba has no types, and its cache can only be extended through private methods)

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core import event as numba_event
from numba.core.caching import FunctionCache

from rlkit._util.activity import Activity

COMPILES = not config.DISABLE_JIT  # pyright: ignore[reportAttributeAccessIssue]  numba sets it while it loads
"""False if NUMBA_DISABLE_JIT is set: no kernel may be called, and the engine computes with torch."""

_COMPILE = "numba:compile"  # the event has no instance for a kernel that the cache holds
_KIND = "warm-up: kernels to compile"

# LLVM fast-math flags that allow vectorised sums, but keep the semantics of infinity and NaN.
FASTMATH_FLAGS = {"reassoc", "contract", "nsz", "arcp"}


def jit_kernel[**P](*, fast: bool = False) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Compile a function at its first call; the function releases the interpreter's lock while it runs.

    Args:
        fast: allow reordered floating-point sums. Do not use it for functions that other kernels call: the rounding
            would depend on inlining.
    """

    def decorate(function: Callable[P, None]) -> Callable[P, None]:
        dispatcher: Any = njit(nogil=True, error_model="numpy", fastmath=FASTMATH_FLAGS if fast else False)(function)
        with suppress(RuntimeError):  # neither the source's folder nor the user's cache is writable
            dispatcher._cache = _SourceCheckedCache(function)
        return dispatcher

    return decorate


class CompileReporter(numba_event.Listener):
    """Report the kernels that are being compiled: the first run on a machine waits for them."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        activity.put(_KIND, 0)  # displayed first
        numba_event.register(_COMPILE, self)

    def on_start(self, event: Any) -> None:
        """Count a kernel."""
        self._activity.add(_KIND)

    def on_end(self, event: Any) -> None:
        """Count a kernel less."""
        self._activity.add(_KIND, -1)

    def close(self) -> None:
        """Stop reporting; a further call has no effect."""
        with suppress(ValueError):
            numba_event.unregister(_COMPILE, self)


class _SourceCheckedCache(FunctionCache):
    """numba's cache, checked against all sources of this folder; calls work even if the disk is full."""

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), _hash_sources())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a truncated file can raise any error
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # the disk is full
            super().save_overload(sig, data)


@cache
def _hash_sources() -> str:
    """Hash the sources of this folder, which holds all compiled functions."""
    return sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()
