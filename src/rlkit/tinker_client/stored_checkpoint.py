"""Checkpoints of an account, as its service lists them.

Invariant: a listed checkpoint is described without a request of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint on the service."""

    path: str
    kind: Literal["training", "sampler", "external"]  # with the optimiser, for sampling, or an adapter to download
    created: float  # time in seconds since the epoch
    size_bytes: int | None = None  # None if unknown
    expires: float | None = None  # time in seconds since the epoch; None for never
