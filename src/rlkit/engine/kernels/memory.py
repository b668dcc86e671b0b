"""Memory that the system clears when it is first used, in pages as large as it has.

New memory costs a page fault for every 4 kB, as long as computing with it does: what is large is asked for in large
pages, and what is needed again and again is kept.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

_LARGE_BYTES = 4 << 20


def cleared(count: int) -> NDArray[np.float32]:
    """So many zeros."""
    size = 4 * count
    if size < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(count, np.float32)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.float32)
