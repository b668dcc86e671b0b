"""The KL penalty against a reference policy, token by token.

Invariant: a token that was not sampled never gets an advantage; the penalties of a group, without a discount, sum to 0.
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
"""Function from a prompt and a count to the reference's log-probabilities of that many last tokens, float32."""

type Drifts = Sequence[NDArray[np.float64]]
"""For each sequence of a group, d = log q − log p_ref of its sampled tokens, [sampled] float64."""


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """A term λ · (mean(d) − d_t) in the advantage of each sampled token, with d = log q − log p_ref.

    The mean is over the sampled tokens of the group. With a discount γ, a token also answers for those after it in its
    sequence: λ · Σ_k γ^k (mean(d) − d_{t+k}) over the sampled tokens from t on. Source: tinker-cookbook,
    `incorporate_kl_penalty`; its mean is over the batch, which is not complete when a group is prepared. Either mean is
    a baseline, and moves no expected gradient but for the part that a token has in it.

    Args:
        score: the reference.
        coefficient: λ, above 0.
        discount: γ, from 0 to 1.
    """

    score: Score
    coefficient: float
    discount: float = 0.0

    async def drifts(self, data: Sequence[Datum]) -> Drifts:
        """Return the drifts of a group's sequences.

        Raises:
            ServiceError: the service failed after retries, or gave no log-probability for a token.
        """
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
        """Return d of the sampled tokens of a sequence, [sampled] float64."""
        places = np.flatnonzero(datum.mask)
        if not len(places):
            return np.empty(0)
        last = len(datum.targets) - int(places[0])  # from the first sampled token on
        scores = await self.score(datum.prompt + as_prompt(datum.targets[-1:]), last)
        drift = (datum.logprobs[-last:].astype(np.float64) - scores)[datum.mask[-last:]]
        if not np.isfinite(drift).all():
            raise ServiceError("asking the reference: the service gave no log-probability for a sampled token")
        return drift


def discounted_sums(values: NDArray[np.float64], discount: float) -> NDArray[np.float64]:
    """Return Σ_k discount^k · values[t + k] for each t, both [N] float64."""
    if not discount:
        return values

    def add(later: float, value: float) -> float:
        return value + discount * later

    backwards: list[float] = values[::-1].tolist()
    return np.array(list(accumulate(backwards, add)), np.float64)[::-1]
