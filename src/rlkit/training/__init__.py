"""Training: the protocol of a trainer, and the signal that stops a run.

Invariant: importing this module loads nothing heavy. A request to stop never blocks, so a signal handler can make it.
"""

from __future__ import annotations

import threading
from typing import Protocol

from rlkit.trackers import RunResult


class Trainer(Protocol):
    """Trainer of a model.

    ::

        result = await rlkit.RLTrainer(config, envs=tasks).train()
        print(result.metrics["env/all/reward/mean"])
    """

    async def train(self) -> RunResult:
        """Train to the end, or until a stop is requested."""
        ...


class StopSignal:
    """Request from any thread that a run finishes its step, saves its weights and ends."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._watched = threading.Event()

    def request(self) -> None:
        """Make the request; repetitions have no effect."""
        self._event.set()

    def watch(self) -> None:
        """Record that the run has begun its steps and now reacts to requests."""
        self._watched.set()

    @property
    def is_watched(self) -> bool:
        """True once the run has begun its steps; before that there is nothing to finish or save."""
        return self._watched.is_set()

    @property
    def is_requested(self) -> bool:
        """True once a stop is requested."""
        return self._event.is_set()
