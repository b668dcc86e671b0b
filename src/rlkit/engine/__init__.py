"""A Tinker-compatible engine for small models, in this process, on the CPU.

Invariant: importing this package loads neither torch nor the Tinker SDK; that happens when `EngineServer` is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.engine.server import EngineServer

__all__ = ["EngineServer"]


def __getattr__(name: str) -> object:
    if name == "EngineServer":
        from rlkit.engine.server import EngineServer

        return EngineServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
