"""How completions are drawn, and how rollouts are played: the sections `sampling` and `rollouts`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlkit._util.sections import Positive, Probability, Section


class BudgetForcingConfig(Section):
    """An answer for a reply of a conversation whose tokens were used up by thinking."""

    context_window_tokens: Positive
    """Tokens of the prompt, the thinking and the answer together: the answer gets what the others leave."""
    phrase: str = "\n\n... okay, I am out of thinking tokens. I need to send my final message now."
    """What the thinking ends with; it is TTT-Discover's. Like the tokens that open the answer, it is not trained on."""


class SamplingConfig(Section):
    """How completions are drawn in training."""

    max_tokens: Positive = 256
    """Tokens that one completion may have. Short by default: the longest rollout of a batch sets the time of a step."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """1 samples from the model itself, which is what the policy gradient assumes."""
    top_p: Probability = 1.0
    """Below 1 the sampled tokens are no longer those of the policy that is trained."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """-1 keeps every token, for the same reason."""
    stop: list[str] | None = None
    """Strings that end a completion; null for the model's own end of turn."""
    budget_forcing: BudgetForcingConfig | None = None
    """What becomes of a reply that has used up `max_tokens`; null leaves it cut off, as most environments mean it."""


class RolloutsConfig(Section):
    """How rollouts are played."""

    max_live: Positive = 256
    """Rollouts at once. The Tinker service queues what it cannot take, so more is rarely faster."""
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds that one rollout may take before it counts as failed; waiting for a service in trouble is not counted."""
    max_retries: Annotated[int, Field(ge=0)] = 2
    """Failed episodes of a group that are played again; past that the group goes on with those that are valid."""
    min_valid: Positive = 2
    """Episodes with a reward that a group must have; one with fewer is dropped, and another is played instead. Two are
    the fewest that can be compared; a group of 1 needs its one."""
    coalesce: Literal["single_turn", "always", "never"] = "single_turn"
    """Whether the first turns of a group go out as one request, which computes their prompt once. They are answered
    together, so a conversation would wait for the longest of them."""
