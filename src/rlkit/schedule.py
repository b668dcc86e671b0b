"""Which groups a step trains on, and with which weights they are played."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlkit.concurrency import together
from rlkit.policy import Sampler
from rlkit.rollouts import Player
from rlkit.sources import Mixture
from rlkit.types import Group


class Schedule(Protocol):
    """Decides what is played when; the training loop is the same for all."""

    async def groups(self, sampler: Sampler) -> Sequence[Group]:
        """The groups of the next step, ordered by draw; empty when the tasks have run out.

        Args:
            sampler: the newest weights.
        """
        ...


class Synchronous(Schedule):
    """Every step plays its own groups with the newest weights, and waits for all of them: on-policy, and repeatable."""

    def __init__(self, *, tasks: Mixture, player: Player, groups_per_step: int) -> None:
        self._tasks = tasks
        self._player = player
        self._groups_per_step = groups_per_step

    async def groups(self, sampler: Sampler) -> Sequence[Group]:  # noqa: D102  inherited
        drawn = self._tasks.draw(self._groups_per_step)
        groups = await together(self._player.play(task, lambda: sampler) for task in drawn)
        for group in groups:
            self._tasks.observe(group)
        return groups
