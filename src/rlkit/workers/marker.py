"""The call whose code a worker runs at this moment, in memory that survives the worker.

Invariant: the marker names a call exactly while code of an environment runs on the worker's event loop, so that the
reader knows which rollout ended or blocked the worker. Otherwise it is renewed while the event loop runs.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from typing import NamedTuple

_FORMAT = struct.Struct("=qdd")


class RunningCall(NamedTuple):
    """A call whose code runs."""

    call: int  # number of the call; 0 for none
    began_s: float  # start of the code, or the last renewal, as `time.monotonic()`
    limit_s: float  # time limit of the rollout; without one, that of the last


class Marker:
    """Shared memory of a run and one of its workers; `descriptor` is None to create it."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("rlkit_worker") if descriptor is None else descriptor
        if descriptor is None:
            os.truncate(self.descriptor, _FORMAT.size)
        self._memory = mmap.mmap(self.descriptor, _FORMAT.size)
        self._limit_s = math.inf
        self.clear()

    def set(self, call: int, limit_s: float) -> None:
        """Set the running call, as of now."""
        self._limit_s = limit_s
        _FORMAT.pack_into(self._memory, 0, call, time.monotonic(), limit_s)

    def clear(self) -> None:
        """Set that no call runs, as of now."""
        _FORMAT.pack_into(self._memory, 0, 0, time.monotonic(), self._limit_s)

    def get(self) -> RunningCall:
        """Return the running call."""
        return RunningCall(*_FORMAT.unpack_from(self._memory))

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self.descriptor)
