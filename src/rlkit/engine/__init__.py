"""A Tinker-compatible engine for small models, in this process, on the CPU or a GPU.

Invariant: importing this package loads neither torch nor the Tinker SDK; the first use of `EngineServer` does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.engine.server.server import EngineServer

__all__ = ["EngineServer"]

# Torch's threads spin while they wait for each other. With the default spin time, another program on the same cores
# makes the engine twenty times slower: 8 tokens a second instead of 150. On idle cores a short spin costs nothing. Both
# settings must be set before torch is imported, directly or by the Tinker SDK.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# With large pages torch has fewer page faults: each micro-batch uses new memory, with a fault for every page.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def __getattr__(name: str) -> object:
    if name == "EngineServer":
        from rlkit.engine.server.server import EngineServer

        return EngineServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
