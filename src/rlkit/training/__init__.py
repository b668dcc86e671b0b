"""Training: the protocol of a trainer, and the signal that stops one.

Invariant: importing this loads nothing heavy, and who asks a run to stop waits for nothing, so that a handler of
signals can ask.
"""

from __future__ import annotations

import threading
from typing import Protocol

from rlkit.trackers import RunResult


class Trainer(Protocol):
    """Makes a model better.

    ::

        result = await rlkit.RLTrainer(config, envs=tasks).train()
        print(result.metrics["env/all/reward/mean"])
    """

    async def train(self) -> RunResult:
        """Train to the end, or until asked to stop."""
        ...


class StopSignal:
    """Asks a run, from any thread, to finish its step, save and end."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._watched = threading.Event()

    def request(self) -> None:
        """Ask. Asking twice is asking once."""
        self._event.set()

    def watch(self) -> None:
        """Say that the run has begun its steps: from now on it looks whether someone asked."""
        self._watched.set()

    @property
    def is_watched(self) -> bool:
        """Whether the run has begun its steps. Before that there is no step to finish, and nothing to save."""
        return self._watched.is_set()

    @property
    def requested(self) -> bool:
        """Whether someone asked."""
        return self._event.is_set()
