"""Connections between a run and its workers, for another place where workers run.

Invariant: a connection belongs to one worker, which is lost at most once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """The end of a worker."""

    reason: str  # phrase for people, such as "the environment ended its process (exit code 3)"
    culprit: int | None  # call whose code ended the worker; 0 if unknown; None if none did, such as for a lost machine


class Connection(Protocol):
    """Connection to a worker, wherever it runs."""

    def send(self, frame: bytes) -> None:
        """Send a frame; do nothing after the end of the worker."""

    async def close(self) -> None:
        """Let the worker clean up, and wait for its end."""


class WorkerOwner(Protocol):
    """Receiver of what a worker sends, wherever it runs."""

    def receive(self, frame: bytes, /) -> None:
        """Receive the content of a frame."""

    def lose(self, loss: WorkerLoss, /) -> None:
        """Receive the end of the worker, once, unless `close` was called."""

    def show(self, line: str, /) -> None:
        """Receive a line that was written to the worker's standard output, not by Python code."""


type Connect = Callable[[WorkerOwner], Connection]
"""Starts a worker."""
