"""Training: the protocol of a trainer, and the signal that stops a run.

Invariant: importing this module loads nothing heavy. A request to stop never blocks, so a signal handler can make it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(eq=False)
class StopSignal:
    """Request from any thread that a run finishes its step, saves its weights and ends."""

    is_requested: bool = field(default=False, init=False)
    """True once a stop is requested."""
    is_watched: bool = field(default=False, init=False)
    """True once the run has begun its steps; before that there is nothing to finish or save."""

    def request(self) -> None:
        """Make the request; repetitions have no effect."""
        self.is_requested = True

    def watch(self) -> None:
        """Record that the run has begun its steps and now reacts to requests."""
        self.is_watched = True
