"""Sampling requests, stop rules and results.

Invariant: a sample ends with the first token that is a stop token or completes a stop string, and includes that token.
All log-probabilities are those of the model's distribution before temperature, top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlkit.engine.decode.token_sampling import DrawSettings

# A tokeniser may decode the first tokens of a part differently: it may strip a space, or omit a partial character.
_MARGIN_TOKENS = 8

type TextDecoder = Callable[[Sequence[int]], str]
"""Function from token ids to their text."""


@dataclass(frozen=True)
class StopRule:
    """Stop tokens, and stop strings in the decoded text of the completion."""

    tokens: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: TextDecoder | None = None  # needed for `strings`

    @cached_property
    def _reach(self) -> int:
        # A token has at least one byte, so a string spans at most as many tokens as it has bytes.
        return max((len(string.encode()) for string in self.strings), default=0) + _MARGIN_TOKENS

    def is_finished(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of `tokens` completes the sample."""
        if tokens[-1] in self.tokens:
            return True
        if not self.strings or self.decode is None:
            return False
        text = self.decode(tokens[-self._reach :])
        return any(string in text for string in self.strings)


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """A prompt, the number of completions to sample, and the scores to report."""

    prompt: NDArray[np.int64]  # [P] int64, not empty
    num_samples: int
    max_tokens: int | None  # None for the rest of the context window
    seed: int
    settings: DrawSettings
    stop: StopRule
    top: int = 0  # number of likeliest tokens to report at every sampled token
    prompt_logprobs: bool = False  # True to score the prompt
    prompt_top: int = 0  # number of likeliest tokens to report at each token of the prompt
    # tokens at the end of the prompt that `prompt_logprobs` and `prompt_top` report on; None for all
    last_tokens: int | None = None
    # [P - 1, K] int64, tokens to score at each position after the first; −1 scores nothing
    targets: NDArray[np.int64] | None = None
    alternatives: int = 0  # number of tokens to draw at each position after the first

    @property
    def report_start(self) -> int:
        """First position that `prompt_logprobs` and `prompt_top` report on, 1 at the least."""
        return max(len(self.prompt) - (len(self.prompt) if self.last_tokens is None else self.last_tokens), 1)

    @property
    def score_start(self) -> int:
        """First position of the prompt with any score, len(prompt) if there is none."""
        if self.targets is not None or self.alternatives:
            return 1
        return self.report_start if self.prompt_logprobs or self.prompt_top else len(self.prompt)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Tokens and their log-probabilities, each [n, k]; −1 and NaN for missing entries."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion: `tokens [C] int32` with the stop token or string, `logprobs [C] float32`, `top [C, k]`."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    has_stopped: bool
    top: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Scores of a prompt of P tokens; None for scores that were not requested."""

    logprobs: NDArray[np.float32] | None = None  # [P] float32, NaN where none was requested
    top: TokenLogprobs | None = None  # [P, k]
    targets: NDArray[np.float32] | None = None  # [P - 1, K] float32, NaN where none was requested
    alternatives: TokenLogprobs | None = None  # [P - 1, k]


@dataclass(frozen=True, slots=True, eq=False)
class SampleResult:
    """The answer to a request."""

    samples: tuple[Sample, ...]
    prompt_scores: PromptScores


@dataclass(eq=False, slots=True)
class Ticket:
    """A request in progress: at most `limit` tokens a sample; `owner` is its client."""

    request: SampleRequest
    on_result: Callable[[SampleResult], None]
    limit: int
    samples: list[Sample | None]
    owner: str = ""
    prompt_scores: PromptScores = field(default_factory=PromptScores)


@dataclass(eq=False, slots=True)
class Row:
    """A sample in progress: a row of the batch."""

    ticket: Ticket
    index: int
    arrival: int  # increases with the time of arrival
    reserved_positions: int = 0  # before the row was requeued; 0 if it was not
    random: np.random.Generator = field(init=False)
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: TokenLogprobs | None = None

    def __post_init__(self) -> None:
        # Sample i of seed s is sample 0 of seed s + i, so requests can be split and joined.
        self.random = np.random.Generator(np.random.Philox(key=(self.ticket.request.seed + self.index) % 2**64))

    @property
    def length(self) -> int:
        """Number of tokens in the prompt and the sample so far."""
        return len(self.ticket.request.prompt) + len(self.tokens)

    def record_top(self, ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Record the likeliest tokens [k] and their log-probabilities for the next draw."""
        if self.top is None:
            # Allocate for the longest sample, because untouched memory costs nothing.
            shape = (self.ticket.limit, len(ids))
            self.top = TokenLogprobs(np.empty(shape, np.int32), np.empty(shape, np.float32))
        self.top.ids[len(self.tokens)], self.top.logprobs[len(self.tokens)] = ids, logprobs

    def extend(self, token: int, logprob: float) -> bool:
        """Append a token; return whether the sample continues."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        ticket = self.ticket
        has_stopped = ticket.request.stop.is_finished(self.tokens)
        if not has_stopped and len(self.tokens) < ticket.limit:
            return True
        count = len(self.tokens)
        top = None if self.top is None else TokenLogprobs(self.top.ids[:count], self.top.logprobs[:count])
        ticket.samples[self.index] = Sample(
            np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32), has_stopped, top
        )
        return False
