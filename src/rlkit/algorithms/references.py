"""Advantage terms of single tokens from a reference model: the KL penalty, and teachers.

Invariant: only sampled tokens get a term; a reference that fails is a `ServiceError`, never an advantage.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from rlkit._util.threads import run_together
from rlkit.errors import EnvironmentFault, ServiceError
from rlkit.types import Datum, Floats, Group, Message, Prompt, Turn, as_prompt

type Score = Callable[[Prompt, int], Awaitable[Floats]]
"""Function from a prompt and a count to the reference's float32 log-probabilities of the last `count` tokens, without
those of tokens beyond the reference's context."""

type Drifts = Sequence[NDArray[np.float64]]
"""For each sequence of a group, d = log q − log p_ref of its sampled tokens, [sampled] float64."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A term w · Σ_k γ^k (m − d_{t+k}) in the advantage of sampled token t, with d = log q − log p_ref.

    The sum is over the sampled tokens of the sequence from t on; without a discount γ the term is w · (m − d_t).

    - The KL penalty subtracts drifts from their mean m over the sampled tokens of the group. Source: tinker-cookbook,
      `incorporate_kl_penalty`, whose mean is over the batch; here a group is prepared before the batch is complete.
      Either mean is a baseline: it changes the expected gradient only by the token's own share of the mean.
    - A teacher has m = 0, so the expected gradient is that of −KL(q‖p_ref) of each token: on-policy distillation
      (Agarwal et al. 2024, "On-Policy Distillation of Language Models", with the reverse KL).
    """

    score: Score  # computes the reference's log-probabilities
    weight: float  # w > 0
    discount: float = 0.0  # γ, from 0 to 1
    is_teacher: bool = False  # the reference is to be approached, so its drifts are not centred
    name: str = ""  # name of one of several teachers, for metrics
    clip: float = np.inf  # largest |d| in the term
    first_step: int = 1  # first training step of the term
    last_step: int | None = None  # last training step of the term; None for no end
    # Makes the prompt that the reference sees in the place of a segment's first prompt, from the messages of that
    # prompt; None for the same prompt.
    make_context: Callable[[Sequence[Message]], Prompt] | None = None

    def is_active(self, group: Group) -> bool:
        """Return whether the term counts for a group: a group belongs to the step after that of its newest weights."""
        step = 1 + max((turn.version for episode in group.episodes for turn in episode.turns), default=0)
        return self.first_step <= step and (self.last_step is None or step <= self.last_step)

    async def drifts(self, sequences: Sequence[tuple[Datum, Turn]]) -> Drifts:
        """Request the drifts of sequences, each with its first turn; ServiceError if the reference fails."""
        return await run_together(self._drift(datum, root) for datum, root in sequences)

    def apply(self, data: Sequence[Datum], drifts: Drifts) -> list[Datum]:
        """Return a group's sequences with the term in their advantages."""
        clipped = [drift.clip(-self.clip, self.clip) for drift in drifts]
        every = np.concatenate([np.empty(0), *clipped])
        mean = 0.0 if self.is_teacher or not len(every) else float(every.mean())
        changed = list[Datum]()
        for datum, drift in zip(data, clipped, strict=True):
            advantages = datum.advantages.copy()
            advantages[datum.mask] += self.weight * discounted_sums(mean - drift, self.discount)
            changed.append(replace(datum, advantages=advantages))
        return changed

    async def _drift(self, datum: Datum, root: Turn) -> NDArray[np.float64]:
        """Request the drift of a sequence, [sampled] float64."""
        places = np.flatnonzero(datum.mask)
        if not len(places):
            return np.empty(0)
        last = len(datum.targets) - int(places[0])  # from the first sampled token on
        sequence = datum.prompt + as_prompt(datum.targets[-1:])
        if self.make_context is not None:
            if not root.messages:
                problem = "a turn has tokens and no messages, because its environment called policy.sample"
                raise EnvironmentFault(f"teacher.prompt: {problem}; use policy.chat, or leave out teacher.prompt")
            sequence = self.make_context(root.messages[:-1]) + sequence.drop_first(len(root.prompt))
        scores = (await self.score(sequence, last)).astype(np.float64)
        span = slice(int(places[0]), int(places[0]) + len(scores))
        drift = (datum.logprobs[span] - scores)[datum.mask[span]]
        if not np.isfinite(drift).all():
            raise ServiceError("asking the reference: the service returned no log-probability for a sampled token")
        # Tokens beyond the reference's context have no term.
        return np.concatenate([drift, np.zeros(len(places) - len(drift))])


def discounted_sums(values: NDArray[np.float64], discount: float) -> NDArray[np.float64]:
    """Return Σ_k discount^k · values[t + k] for each t, [N] float64."""
    if not discount:
        return values
    sums: accumulate[float] = accumulate(values[::-1].tolist(), lambda later, value: value + discount * later)
    return np.array(list(sums), np.float64)[::-1]
