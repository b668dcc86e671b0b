"""The conversations of an episode as segments, in which each turn extends the previous turn token for token.

Invariant: a segment's tokens are those that its turns were sampled from, and never a new rendering of their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import cast

import numpy as np

from rlkit.chat.format import ChatFormat, extend
from rlkit.types import Message, Prompt, Tool, Turn, as_prompt, join


@dataclass(slots=True, eq=False)
class Segment:
    """A chain of turns in which each turn extends the previous turn token for token."""

    index: int  # index of the last turn in the record
    turn: Turn  # the last turn
    tokens: Prompt  # all tokens of the segment
    messages: Sequence[Message] = ()  # the conversation that the tokens encode; empty after `sample`
    tools: Sequence[Tool] = ()
    is_rendered: bool = True  # the last prompt may equal the format's rendering of its conversation
    replies: tuple[tuple[int, int], ...] = ()  # index of each turn of the conversation, and messages up to its reply


@dataclass(slots=True, eq=False)
class Segments:
    """The segments of an episode; `turns` is its record, to which `add` appends."""

    chat: ChatFormat
    turns: list[Turn]
    _segments: list[Segment] = field(default_factory=list[Segment])

    def render(
        self, segment: Segment | None, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Prompt, bool]:
        """Return the prompt for a conversation, and whether it may equal the format's rendering.

        `segment` is the segment that the conversation continues; None starts a new segment.
        """
        if segment is None:
            return self.chat.render(messages, tools), True
        # Render the whole conversation only if the tokens after the reply cannot be derived without it.
        drops_thinking = not self.chat.keeps_thinking and any("thinking" in message for message in segment.messages)
        rendered = None
        if segment.is_rendered and (drops_thinking or segment.turn.stop == "length"):
            rendered = self.chat.render(messages, tools)
            if len(rendered) > len(segment.tokens) and rendered.starts_with(segment.tokens):
                return rendered, True
        replied = len(segment.messages) - 1
        extended = extend(self.chat, segment.tokens, segment.turn, messages, replied=replied, tools=tools)
        if extended is not None:
            return extended, segment.is_rendered and rendered is None
        return self.chat.render(messages, tools) if rendered is None else rendered, True

    def find(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Segment | None:
        """Return the newest segment whose conversation these messages continue."""
        segments = [segment for segment in self._segments if _is_same(list(tools), segment.tools)]
        for segment in reversed(segments):
            old, count = segment.messages, len(segment.messages)
            if 0 < count < len(messages) and _is_same(list(messages[:count]), old):
                return segment
        forks = [self._fork(segment, messages) for segment in segments]
        return max(filter(None, forks), key=lambda fork: len(fork.messages), default=None)

    def _fork(self, segment: Segment, messages: Sequence[Message]) -> Segment | None:
        """Return the segment up to the last reply that these messages contain; None if they contain none."""
        pairs = zip(messages[:-1], segment.messages, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: _is_same(*pair), pairs))
        if not (replies := tuple(reply for reply in segment.replies if reply[1] <= shared)):
            return None
        index, count = replies[-1]
        turns = [self.turns[index] for index, _ in replies]
        tokens = join([piece for turn in turns for piece in (turn.prompt, as_prompt(turn.completion))])
        return Segment(index, turns[-1], tokens, segment.messages[:count], segment.tools, replies=replies)

    def add(self, turn: Turn, *, earlier: Segment | None = None) -> Segment:
        """Record a turn with its whole prompt, and return the segment that it ends.

        The turn extends the longest segment, or a fork (`earlier`), whose tokens begin its prompt.
        """
        prompt, segments = turn.prompt, self._segments if earlier is None else [earlier, *self._segments]
        fitting = [segment for segment in segments if prompt.starts_with(segment.tokens)]
        if parent := max(fitting, key=lambda segment: len(segment.tokens), default=None):
            turn = replace(turn, prompt=prompt.drop_first(len(parent.tokens)), parent=parent.index)
        self.turns.append(turn)
        if parent in self._segments:  # otherwise the turn forks
            self._segments.remove(parent)
        tokens = Prompt(np.concatenate([prompt.tokens, turn.completion]), prompt.images)
        self._segments.append(Segment(len(self.turns) - 1, turn, tokens))
        return self._segments[-1]


def _is_same(first: object, second: object) -> bool:
    """Compare values of JSON: `true` and 1, which are equal in Python, differ; 1 and 1.0 are one number."""
    if isinstance(first, bool) is not isinstance(second, bool):
        return False
    if isinstance(first, dict) and isinstance(second, dict):
        old, new = cast("dict[str, object]", first), cast("dict[str, object]", second)
        return old.keys() == new.keys() and all(_is_same(value, new[key]) for key, value in old.items())
    if isinstance(first, list) and isinstance(second, list):
        values, others = cast("list[object]", first), cast("list[object]", second)
        return len(values) == len(others) and all(map(_is_same, values, others))
    return first == second
