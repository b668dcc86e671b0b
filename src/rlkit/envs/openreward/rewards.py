"""From the rewards of tool calls to the reward of an episode.

Invariant: a call without a reward is not a call with the reward 0: it takes no part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlkit.errors import EnvironmentFault, UsageError

type Reduction = Literal["sum", "mean", "last", "max", "min"]


@dataclass(frozen=True)
class RewardRule:
    """What an episode is worth.

    Args:
        reduction: of the rewards of its calls, in their order.
        nonterminal: one more reward, of an episode that the environment did not end; None for none.
        least: the reward is at least this.
        most: the reward is at most this.
    """

    reduction: Reduction = "sum"
    nonterminal: float | None = None
    least: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        given = {"nonterminal_reward": self.nonterminal, "min_reward": self.least, "max_reward": self.most}
        for name, value in given.items():
            if value is not None and not math.isfinite(value):
                raise UsageError(f"{name}: {value} is no finite number")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise UsageError(f"min_reward: {self.least:g} is above max_reward, {self.most:g}")

    def of(self, rewards: Sequence[float | None], *, finished: bool, compared: bool = False) -> float:
        """The reward of an episode.

        An episode that the model did not bring to its end, and that was never rewarded, is worth 0: it did the task
        wrong.

        Args:
            rewards: rewards of its calls; None where the environment gave none.
            compared: whether it will be rewarded once its group is complete, so that it need not be before.

        Raises:
            EnvironmentFault: the environment ended it, and never gave a reward, nor will.
        """
        given = [reward for reward in rewards if reward is not None]
        if not finished and self.nonterminal is not None:
            given.append(self.nonterminal)
        if not given and finished and not compared:
            raise EnvironmentFault("the environment ended the episode and gave no reward in all of it")
        return self.within(_reduced(given, self.reduction) if given else 0.0)

    def within(self, reward: float) -> float:
        """A reward, within the bounds."""
        if self.least is not None:
            reward = max(reward, self.least)
        return reward if self.most is None else min(reward, self.most)


def _reduced(rewards: Sequence[float], reduction: Reduction) -> float:
    match reduction:
        case "sum":
            return float(sum(rewards))
        case "mean":
            return float(sum(rewards)) / len(rewards)
        case "last":
            return float(rewards[-1])
        case "max":
            return float(max(rewards))
        case "min":
            return float(min(rewards))
