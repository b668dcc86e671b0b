"""Reward shaping before advantage estimation, and advantage shaping after it: length penalty, clipping, normalisation.

Invariants: results depend on a single group, so a group can be trained before others finish, and a repeated step gives
the same numbers. Recorded rewards never change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlkit.types import Group


@dataclass(frozen=True, slots=True)
class LengthPenalty:
    """The reward r − coefficient · clip((n − start) / (full − start), 0, 1), with n the sampled tokens of the episode.

    This is DAPO's soft overlong punishment (Yu et al. 2025, eq. 13, arXiv:2503.14476) times a coefficient, with L_max =
    `full` and L_cache = `full` − `start`; `full` must be above `start`.
    """

    coefficient: float
    start: int
    full: int

    def amount(self, tokens: int) -> float:
        """Return the penalty of an episode with this number of sampled tokens."""
        return self.coefficient * min(max((tokens - self.start) / (self.full - self.start), 0.0), 1.0)

    def apply(self, group: Group) -> tuple[Group, float]:
        """Return the group with penalised rewards, and the mean penalty of its valid episodes (0 without any)."""
        total, episodes = 0.0, list(group.episodes)
        for place, episode in enumerate(group.episodes):
            if episode.reward is not None:
                penalty = self.amount(episode.sampled_tokens)
                rewards = {role: reward - penalty for role, reward in episode.rewards.items()}
                episodes[place] = replace(episode, reward=episode.reward - penalty, rewards=rewards)
                total += penalty
        return replace(group, episodes=tuple(episodes)), total / max(int(group.valid_mask.sum()), 1)


def clip_advantages(rows: Sequence[NDArray[np.float64]], limit: float) -> tuple[list[NDArray[np.float64]], float]:
    """Return [turns] advantages of each episode clipped to ±`limit`, and the share of clipped values."""
    beyond = sum(int(np.count_nonzero(np.abs(row) > limit)) for row in rows)
    return [row.clip(-limit, limit) for row in rows], beyond / max(sum(len(row) for row in rows), 1)


@dataclass(frozen=True, slots=True)
class Normalization:
    """Advantage weights that turn a group's summed loss into a mean.

    With T_i the trained tokens of episode i, over all its sequences, and G the trained episodes of the group:

        token      1 / Σ_i T_i       DAPO (Yu et al. 2025, eq. 8, arXiv:2503.14476)
        sequence   1 / (G · T_i)     GRPO (Shao et al. 2024, eq. 3, arXiv:2402.03300)
        constant   1 / (G · L)       Dr. GRPO (Liu et al. 2025, §3.2, arXiv:2503.20783)

    All weights are also divided by the number of groups in an optimiser step, including groups with zero advantage, so
    the loss of a full step is the mean over its groups.
    """

    kind: Literal["token", "sequence", "constant"]
    groups_per_step: float  # mean number of groups in an optimiser step
    constant_tokens: int  # constant length L

    def weights(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return [G] weights of trained episodes from their [G] numbers of trained tokens; 0 without tokens."""
        episodes = len(counts)
        divisors = {"token": counts.sum(), "sequence": counts * episodes, "constant": self.constant_tokens * episodes}
        divisor = np.full(episodes, divisors[self.kind], np.float64)
        return np.divide(1.0, divisor * self.groups_per_step, out=np.zeros(episodes), where=counts > 0)
