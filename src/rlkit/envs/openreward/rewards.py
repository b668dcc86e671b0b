"""Rewards of episodes, computed from the rewards of their tool calls.

Invariant: a call without a reward is ignored; it does not count as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlkit.errors import EnvironmentFault, UsageError

type Reduction = Literal["sum", "mean", "last", "max", "min"]

_REDUCTIONS: Mapping[Reduction, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "mean": lambda rewards: sum(rewards) / len(rewards),
    "last": lambda rewards: rewards[-1],
    "max": max,
    "min": min,
}


@dataclass(frozen=True)
class RewardRule:
    """Rule for the reward of an episode."""

    reduction: Reduction = "sum"  # function of the rewards of its calls, in their order
    nonterminal: float | None = None  # additional reward of an episode that the environment did not end; None for none
    minimum: float | None = None
    maximum: float | None = None

    def __post_init__(self) -> None:
        settings = {"nonterminal_reward": self.nonterminal, "min_reward": self.minimum, "max_reward": self.maximum}
        for name, value in settings.items():
            if value is not None and not math.isfinite(value):
                raise UsageError(f"{name}: {value} is not a finite number")
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise UsageError(f"min_reward: {self.minimum:g} is above max_reward, {self.maximum:g}")

    def compute(self, rewards: Sequence[float | None], *, finished: bool, is_group_scored: bool = False) -> float:
        """Return the reward of an episode.

        An unfinished episode without rewards has reward 0, because the model did not solve the task.

        Args:
            rewards: rewards of its calls; None for a call without one.
            is_group_scored: True if its group will be scored, so that the episode needs no reward before.

        Raises:
            EnvironmentFault: the environment ended it without any reward.
        """
        values = [reward for reward in rewards if reward is not None]
        if not finished and self.nonterminal is not None:
            values.append(self.nonterminal)
        if not values and finished and not is_group_scored:
            raise EnvironmentFault("the environment ended the episode without any reward")
        return self.clip(float(_REDUCTIONS[self.reduction](values)) if values else 0.0)

    def clip(self, reward: float) -> float:
        """Clip a reward to the bounds."""
        if self.minimum is not None:
            reward = max(reward, self.minimum)
        return reward if self.maximum is None else min(reward, self.maximum)
