"""KL penalty of single tokens against a reference policy.

Invariant: only sampled tokens get a penalty; without a discount, the penalties of a group sum to 0.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from rlkit._util.threads import run_together
from rlkit.errors import ServiceError
from rlkit.types import Datum, Floats, Prompt, as_prompt

type Score = Callable[[Prompt, int], Awaitable[Floats]]
"""Function from a prompt and a count to the reference's float32 log-probabilities of the last `count` tokens."""

type Drifts = Sequence[NDArray[np.float64]]
"""For each sequence of a group, d = log q − log p_ref of its sampled tokens, [sampled] float64."""


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """A term λ · Σ_k γ^k (mean(d) − d_{t+k}) in the advantage of sampled token t, with d = log q − log p_ref.

    The sum is over the sampled tokens of the sequence from t on, the mean over the sampled tokens of the group. Without
    a discount γ the term is λ · (mean(d) − d_t). Source: tinker-cookbook, `incorporate_kl_penalty`, whose mean is over
    the batch; here a group is prepared before the batch is complete. Either mean is a baseline: it changes the expected
    gradient only by the token's own share of the mean.

    Args:
        coefficient: λ > 0.
        discount: γ, from 0 to 1.
    """

    score: Score
    coefficient: float
    discount: float = 0.0

    async def drifts(self, data: Sequence[Datum]) -> Drifts:
        """Request the drifts of a group's sequences; raise ServiceError if the reference fails."""
        return await run_together(self._drift(datum) for datum in data)

    def apply(self, data: Sequence[Datum], drifts: Drifts) -> list[Datum]:
        """Return a group's sequences with the penalty in their advantages."""
        group_drifts = np.concatenate([np.empty(0), *drifts])
        mean = float(group_drifts.mean()) if len(group_drifts) else 0.0
        penalized = list[Datum]()
        for datum, drift in zip(data, drifts, strict=True):
            advantages = datum.advantages.copy()
            advantages[datum.mask] += self.coefficient * discounted_sums(mean - drift, self.discount)
            penalized.append(replace(datum, advantages=advantages))
        return penalized

    async def _drift(self, datum: Datum) -> NDArray[np.float64]:
        """Request the drift of a sequence, [sampled] float64."""
        places = np.flatnonzero(datum.mask)
        if not len(places):
            return np.empty(0)
        last = len(datum.targets) - int(places[0])  # from the first sampled token on
        scores = await self.score(datum.prompt + as_prompt(datum.targets[-1:]), last)
        drift = (datum.logprobs[-last:].astype(np.float64) - scores)[datum.mask[-last:]]
        if not np.isfinite(drift).all():
            raise ServiceError("asking the reference: the service returned no log-probability for a sampled token")
        return drift


def discounted_sums(values: NDArray[np.float64], discount: float) -> NDArray[np.float64]:
    """Return Σ_k discount^k · values[t + k] for each t, [N] float64."""
    if not discount:
        return values

    def add(later: float, value: float) -> float:
        return value + discount * later

    backwards: list[float] = values[::-1].tolist()
    return np.array(list(accumulate(backwards, add)), np.float64)[::-1]
