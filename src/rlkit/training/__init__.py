"""Training: from the groups that a schedule plays to better weights, step by step."""

from __future__ import annotations

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
