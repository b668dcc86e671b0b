"""What a Tinker service was asked for, as it bills it.

Invariant: a request counts once it is answered; one that failed counts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Usage:
    """Counts of requests and of tokens by kind.

    Args:
        requests: that were answered.
        prefill_tokens: of prompts, that the service had to compute.
        cached_tokens: of prompts, that it had computed before: its cache had them, or another sample of the request.
        sampled_tokens: that it drew.
        trained_tokens: of the sequences of which it computed a gradient.
    """

    requests: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Usage)))

    @property
    def tokens(self) -> int:
        """Of all kinds."""
        return self.prefill_tokens + self.cached_tokens + self.sampled_tokens + self.trained_tokens

    def sampled(self, *, prompt: int, cached: int, tokens: list[int]) -> None:
        """Count a sampling request.

        Args:
            prompt: its tokens.
            cached: of these, what the service found in its cache.
            tokens: of each sample; all but the first found the whole prompt computed.
        """
        self.requests += 1
        self.prefill_tokens += prompt - cached
        self.cached_tokens += cached + prompt * (len(tokens) - 1)
        self.sampled_tokens += sum(tokens)

    def trained(self, tokens: int) -> None:
        """Count the computation of a gradient."""
        self.requests += 1
        self.trained_tokens += tokens
