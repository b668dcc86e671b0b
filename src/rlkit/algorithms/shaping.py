"""Changes to rewards before the estimate, and to advantages after it: length penalty, clipping, normalisation.

Invariant: each is a function of one group alone, so that a group can be trained on before others are there, and has the
same numbers when its step is repeated. An episode's recorded reward is never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlkit.types import Episode, Group


@dataclass(frozen=True, slots=True)
class LengthPenalty:
    """The reward r − coefficient · clip((n − start) / (full − start), 0, 1), with n the sampled tokens of the episode.

    It is DAPO's soft overlong punishment (Yu et al. 2025, eq. 13, arXiv:2503.14476) times a coefficient, with L_max =
    `full` and L_cache = `full` − `start`.

    Args:
        coefficient: the full penalty, in units of the reward.
        start: sampled tokens up to which there is no penalty.
        full: sampled tokens at which the penalty is full; above `start`.
    """

    coefficient: float
    start: int
    full: int

    def amount(self, tokens: int) -> float:
        """Return the penalty of an episode of so many sampled tokens."""
        return self.coefficient * min(max((tokens - self.start) / (self.full - self.start), 0.0), 1.0)

    def apply(self, group: Group) -> tuple[Group, float]:
        """Return the group with penalised rewards, and the mean penalty of its valid episodes (0 without any)."""
        total, episodes = 0.0, list[Episode]()
        for episode in group.episodes:
            penalty = 0.0 if episode.reward is None else self.amount(episode.sampled_tokens)
            total += penalty
            episodes.append(episode if episode.reward is None else replace(episode, reward=episode.reward - penalty))
        return replace(group, episodes=tuple(episodes)), total / max(int(group.valid_mask.sum()), 1)


def clip_advantages(rows: Sequence[NDArray[np.float64]], limit: float) -> tuple[list[NDArray[np.float64]], float]:
    """Return advantages clipped to ±`limit`, and the share of them that was beyond it.

    Args:
        rows: for each episode, [turns] float64.
    """
    beyond = sum(int(np.count_nonzero(np.abs(row) > limit)) for row in rows)
    return [row.clip(-limit, limit) for row in rows], beyond / max(sum(len(row) for row in rows), 1)


@dataclass(frozen=True, slots=True)
class Normalization:
    """Weights of the advantages by which the loss of a group, a sum over tokens, becomes a mean.

    With T_i the trained tokens of episode i, over all its sequences, and G the trained episodes of the group:

        token      1 / Σ_i T_i       DAPO (Yu et al. 2025, eq. 8, arXiv:2503.14476)
        sequence   1 / (G · T_i)     GRPO (Shao et al. 2024, eq. 3, arXiv:2402.03300)
        constant   1 / (G · L)       Dr. GRPO (Liu et al. 2025, §3.2, arXiv:2503.20783), with L a constant

    All are also divided by the groups of an optimiser step, those that teach nothing included, so that the loss of a
    full step is the mean over its groups.

    Args:
        groups: groups of an optimiser step.
        tokens: L.
    """

    kind: Literal["token", "sequence", "constant"]
    groups: float
    tokens: int

    def weights(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the weight of each trained episode from its trained tokens, both [G]; 0 for one without tokens."""
        episodes = len(counts)
        match self.kind:
            case "token":
                divisor = np.full(episodes, counts.sum(), np.float64)
            case "sequence":
                divisor = counts.astype(np.float64) * episodes
            case "constant":
                divisor = np.full(episodes, self.tokens * episodes, np.float64)
        return np.divide(1.0, divisor * self.groups, out=np.zeros(episodes), where=counts > 0)
