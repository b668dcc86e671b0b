"""A Tinker-compatible engine for small models, in this process, on the CPU or a GPU.

Invariant: importing this package loads neither torch nor the Tinker SDK; that happens when `EngineServer` is asked for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.engine.server.server import EngineServer

__all__ = ["EngineServer"]

# A thread of torch's that waits for another spins, by default for so long that anything else on the same cores
# makes the engine twenty times slower (8 tokens a second where this gives 150). On idle cores it costs nothing. Both
# settings take effect only before torch, or the Tinker SDK, which loads torch, is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# torch asks for large pages then: new memory costs a fault for every page, and a micro-batch's is new each time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def __getattr__(name: str) -> object:
    if name == "EngineServer":
        from rlkit.engine.server.server import EngineServer

        return EngineServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
