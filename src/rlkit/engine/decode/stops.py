"""When a sample is finished.

Invariant: a sample ends with the first token that is a stop token or completes a stop string, and that token is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# A tokeniser may treat the first tokens of what it decodes specially: it strips a space, or holds back a character.
_MARGIN_TOKENS = 8


@dataclass(frozen=True, slots=True)
class StopRule:
    """Stop tokens, and stop strings that are looked for in the decoded text of the completion."""

    tokens: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None  # token ids to text; needed where `strings` is not empty
    _reach: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # A token is at least one byte, so that a string reaches back at most as many tokens as it has bytes.
        reach = max((len(string.encode()) for string in self.strings), default=0) + _MARGIN_TOKENS
        object.__setattr__(self, "_reach", reach)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the last of `tokens` finishes the sample."""
        if tokens[-1] in self.tokens:
            return True
        if not self.strings or self.decode is None:
            return False
        text = self.decode(tokens[-self._reach :])
        return any(string in text for string in self.strings)
