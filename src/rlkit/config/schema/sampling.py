"""The sections `sampling` and `rollouts`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlkit._util.sections import Positive, Probability, Section


class BudgetForcingConfig(Section):
    """A forced answer to a turn whose `max_tokens` were used up by thinking."""

    context_window_tokens: Positive
    """Tokens of prompt, thinking and answer together; the answer gets what the others leave."""
    phrase: str = "\n\n... okay, I am out of thinking tokens. I need to send my final message now."
    """Text that ends the thinking, from TTT-Discover. It is not trained on, nor are the tokens that open the answer."""


class SamplingConfig(Section):
    """Sampling of completions in training."""

    max_tokens: Positive = 256
    """Maximum tokens of a completion. Short, since the longest rollout of a batch sets the time of a step."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Temperature of sampling; 1 samples from the model itself, as the policy gradient assumes."""
    top_p: Probability = 1.0
    """Probability mass of nucleus sampling; 1 is off, since less samples from another policy than the trained one."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Number of most likely tokens to sample from; -1 for all, for the same reason."""
    stop: list[str] | None = None
    """Strings that end a completion; null for the model's own end of turn."""
    budget_forcing: BudgetForcingConfig | None = None
    """Forced answer to a turn that has used up `max_tokens`; null leaves it truncated, as most environments expect."""


class RolloutsConfig(Section):
    """Limits, retries and requests of rollouts."""

    max_live: Positive = 256
    """Maximum concurrent rollouts. The Tinker service queues what it cannot serve, so more is rarely faster."""
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Time limit of a rollout in seconds, after which it fails; service outages do not count."""
    max_retries: Annotated[int, Field(ge=0)] = 2
    """Maximum retries of failed episodes in a group; after that the group continues with its valid episodes."""
    min_valid: Positive = 2
    """Minimum episodes with a reward in a group; a group with fewer is dropped and replaced. Two are the fewest that
    can be compared; a group of 1 needs one."""
    coalesce: Literal["single_turn", "always", "never"] = "single_turn"
    """Groups that send their first turns as one request, which computes the prompt once. All replies come together, so
    a conversation would wait for the longest of them."""
