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
from rlkit.types import Bools, Datum, Floats, Group, Message, Prompt, Tokens, Turn, as_prompt

_EMPTY_LOGPROB = -9_999.0  # services fill places without a token with less


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A model's log-probabilities of N tokens of a prompt, and its K likeliest tokens in their places."""

    logprobs: Floats  # [N] float32
    top_tokens: Tokens  # [N, K] int32
    top_logprobs: Floats  # [N, K] float32

    def take(self, places: slice | Bools) -> Scores:
        """Return the scores of some of the tokens."""
        return Scores(self.logprobs[places], self.top_tokens[places], self.top_logprobs[places])


NO_SCORES = Scores(np.empty(0, np.float32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))

type Score = Callable[[Prompt, int, int], Awaitable[Scores]]
"""Function from a prompt, a count and K to the reference's scores of the last `count` tokens, without those of tokens
beyond the reference's context."""


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    """The distance of the S sampled tokens of a sequence from a reference."""

    ratios: NDArray[np.float64]  # [S], d = log q − log p_ref; 0 beyond the reference's context
    scores: Scores  # of the sampled tokens within the reference's context


type Drifts = Sequence[Drift]
"""The drift of each sequence of a group."""


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
    top_tokens: int = 0  # likeliest tokens of a teacher to give to the loss `distillation`
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
        clipped = [drift.ratios.clip(-self.clip, self.clip) for drift in drifts]
        every = np.concatenate([np.empty(0), *clipped])
        mean = 0.0 if self.is_teacher or not len(every) else float(every.mean())
        changed = list[Datum]()
        for datum, drift, ratios in zip(data, drifts, clipped, strict=True):
            advantages = datum.advantages.copy()
            advantages[datum.mask] += self.weight * discounted_sums(mean - ratios, self.discount)
            top = self._find_top(datum, drift.scores) if self.top_tokens else datum.top
            changed.append(replace(datum, advantages=advantages, top=top))
        return changed

    def _find_top(self, datum: Datum, scores: Scores) -> tuple[Tokens, Floats, Floats]:
        """Return the likeliest tokens of this reference, after those of the others."""
        places, shape = np.flatnonzero(datum.mask)[: len(scores.logprobs)], (len(datum.targets), self.top_tokens)
        tokens, logprobs, weights = np.zeros(shape, np.int32), *np.zeros((2, *shape), np.float32)
        is_token = scores.top_logprobs > _EMPTY_LOGPROB
        count = is_token.shape[1]  # a service may give fewer
        tokens[places, :count] = np.where(is_token, scores.top_tokens, 0)
        logprobs[places, :count] = np.where(is_token, scores.top_logprobs, 0)
        weights[places, :count] = self.weight * is_token
        if datum.top is None:
            return tokens, logprobs, weights
        return (
            np.hstack([datum.top[0], tokens]),
            np.hstack([datum.top[1], logprobs]),
            np.hstack([datum.top[2], weights]),
        )

    async def _drift(self, datum: Datum, root: Turn) -> Drift:
        """Request the drift of a sequence."""
        places = np.flatnonzero(datum.mask)
        if not len(places):
            return Drift(np.empty(0), NO_SCORES)
        last = len(datum.targets) - int(places[0])  # from the first sampled token on
        sequence = datum.prompt + as_prompt(datum.targets[-1:])
        if self.make_context is not None:
            if not root.messages:
                problem = "a turn has tokens and no messages, because its environment called policy.sample"
                raise EnvironmentFault(f"teacher.prompt: {problem}; use policy.chat, or leave out teacher.prompt")
            sequence = self.make_context(root.messages[:-1]) + sequence.drop_first(len(root.prompt))
        answer = await self.score(sequence, last, self.top_tokens)
        span = slice(int(places[0]), int(places[0]) + len(answer.logprobs))
        scores = answer.take(datum.mask[span])
        ratios = datum.logprobs[span][datum.mask[span]] - scores.logprobs.astype(np.float64)
        if not np.isfinite(ratios).all():
            raise ServiceError("asking the reference: the service returned no log-probability for a sampled token")
        # Tokens beyond the reference's context have no term.
        return Drift(np.concatenate([ratios, np.zeros(len(places) - len(ratios))]), scores)


def discounted_sums(values: NDArray[np.float64], discount: float) -> NDArray[np.float64]:
    """Return Σ_k discount^k · values[t + k] for each t, [N] float64."""
    if not discount:
        return values
    sums: accumulate[float] = accumulate(values[::-1].tolist(), lambda later, value: value + discount * later)
    return np.array(list(sums), np.float64)[::-1]
