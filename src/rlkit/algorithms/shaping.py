"""What is done to rewards before advantages are estimated, and to advantages before they are trained on.

Invariant: each is a function of one group alone, so that a group can be trained on before others are there, and comes
out the same when its step is taken again. An episode's recorded reward is never changed.
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
    """r − coefficient · clip((n − start) / (full − start), 0, 1), with n the tokens that the model sampled.

    This is DAPO's soft overlong punishment (Yu et al. 2025, eq. 13, arXiv:2503.14476) times a coefficient, with L_max =
    `full` and L_cache = `full` − `start`.

    Args:
        coefficient: the whole penalty, in units of the reward.
        start: sampled tokens of an episode that cost nothing.
        full: sampled tokens at which the penalty is whole; above `start`.
    """

    coefficient: float
    start: int
    full: int

    def of(self, tokens: int) -> float:
        """What is subtracted from the reward of an episode of so many sampled tokens."""
        return self.coefficient * min(max((tokens - self.start) / (self.full - self.start), 0.0), 1.0)

    def applied(self, group: Group) -> tuple[Group, float]:
        """The group as an estimator is to see it, and the mean penalty of its valid episodes (0 without any)."""
        penalties = [0.0 if one.reward is None else self.of(one.sampled_tokens) for one in group.episodes]
        episodes = tuple(
            one if one.reward is None else replace(one, reward=one.reward - penalty)
            for one, penalty in zip(group.episodes, penalties, strict=True)
        )
        return replace(group, episodes=episodes), sum(penalties) / max(int(group.valid.sum()), 1)


def clipped(rows: Sequence[NDArray[np.float64]], limit: float) -> tuple[list[NDArray[np.float64]], float]:
    """Advantages between −`limit` and `limit`, and the share of them that were not.

    Args:
        rows: for each episode, [turns] float64.
        limit: above 0.
    """
    beyond = sum(int(np.count_nonzero(np.abs(row) > limit)) for row in rows)
    return [row.clip(-limit, limit) for row in rows], beyond / max(sum(len(row) for row in rows), 1)


@dataclass(frozen=True, slots=True)
class Normalization:
    """What a token's advantage is divided by, so that the loss of a group, a sum over tokens, becomes a mean.

    With T_i the tokens of episode i that are trained on, over all its sequences, and G the episodes that have any part
    in the training of the group:

        token      1 / Σ_i T_i       DAPO (Yu et al. 2025, eq. 8, arXiv:2503.14476)
        sequence   1 / (G · T_i)     GRPO (Shao et al. 2024, eq. 3, arXiv:2402.03300)
        constant   1 / (G · L)       Dr. GRPO (Liu et al. 2025, §3.2, arXiv:2503.20783), with L a constant

    All are divided by the groups of an optimiser step, too, those that teach nothing included, so that the loss of a
    full step is the mean over its groups.

    Args:
        kind: one of those.
        groups: of an optimiser step.
        tokens: L.
    """

    kind: Literal["token", "sequence", "constant"]
    groups: float
    tokens: int

    def weights(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """By what each episode's advantages are multiplied, [G] float64, of its trained tokens, [G] int64.

        Both are of the episodes that are trained on; one without tokens gets 0.
        """
        episodes = len(counts)
        match self.kind:
            case "token":
                divisor = np.full(episodes, counts.sum(), np.float64)
            case "sequence":
                divisor = counts.astype(np.float64) * episodes
            case "constant":
                divisor = np.full(episodes, self.tokens * episodes, np.float64)
        return np.divide(1.0, divisor * self.groups, out=np.zeros(episodes), where=counts > 0)
