"""Training: the protocol of a trainer, and the signal that stops one.

Invariant: importing this loads nothing heavy; a request to stop never blocks, so that a signal handler can make it.
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
        """Train to the end, or until asked to stop."""
        ...


class StopSignal:
    """Request to a run, from any thread, to finish its step, save and end."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._watched = threading.Event()

    def request(self) -> None:
        """Make the request; a second one changes nothing."""
        self._event.set()

    def watch(self) -> None:
        """Take note that the run has begun its steps, and heeds requests from now on."""
        self._watched.set()

    @property
    def is_watched(self) -> bool:
        """True once the run has begun its steps; before that there is no step to finish, and nothing to save."""
        return self._watched.is_set()

    @property
    def is_requested(self) -> bool:
        """True once the run is asked to end."""
        return self._event.is_set()
