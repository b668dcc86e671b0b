"""How completions are drawn: the section `sampling`."""

from __future__ import annotations

from typing import Annotated

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
