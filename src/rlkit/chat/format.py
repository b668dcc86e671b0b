"""Conversations as tokens: how messages become a prompt and a completion becomes a message.

Invariant: the prompt of a follow-up turn extends the exact tokens of the turn before it, or is refused. Text that was
rendered, sampled and parsed is never tokenised again to stand for the tokens that were sampled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlkit.chat.thinking_budget import end_of_thinking
from rlkit.types import Json, Message, Prompt, Tokens, Tool, ToolCall, Turn

TAIL_TOKENS = 32
"""Of a prompt's end that say whether the model has begun to think there."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A completion, read.

    Args:
        message: to be appended to the conversation as it stands.
        malformed: the raw texts of tool calls that could not be parsed.
    """

    message: Message
    malformed: tuple[str, ...] = ()


class ChatFormat(Protocol):
    """One model's way of writing conversations."""

    stop: tuple[str, ...] | tuple[int, ...]
    """What ends an assistant's turn."""

    keeps_thinking: bool
    """Whether an earlier turn's thinking stays in later prompts."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """The prompt that asks for the assistant's next message."""
        ...

    def parse(self, completion: Tokens) -> Parsed:
        """The message that a completion stands for; never raises on what a model wrote."""
        ...

    def last_words(self, prompt: Prompt, completion: Tokens, phrase: str) -> Tokens:
        """What ends the thinking of a reply that was cut off, and opens its answer; none where that has begun."""
        said = self.decode(np.concatenate([prompt.tokens[-TAIL_TOKENS:], completion]))
        return self.encode(end_of_thinking(said, phrase))

    def encode(self, text: str) -> Tokens:
        """Plain text as tokens, without special ones."""
        ...

    def decode(self, tokens: Tokens) -> str:
        """Tokens as text, without special ones."""
        ...


def extend(
    chat: ChatFormat, known: Prompt, turn: Turn, messages: Sequence[Message], *, replied: int, tools: Sequence[Tool]
) -> Prompt | None:
    """The prompt for `messages` as an extension of the exact tokens `known`, or None where the format cannot.

    What the format writes after an assistant's message does not depend on what the message says. So the conversation
    is rendered twice, with two different stand-ins for the sampled reply; the longest common tail of the two is the end
    of the reply's turn, the new messages and the header of the next turn, and follows `known` token for token. Nor does
    it depend on what was said before, but for how the conversation begins and is set up; a long one is not tokenised
    for its tail.

    Args:
        known: the prompt and completion of `turn`.
        messages: the whole conversation, in which message `replied` is the one that `turn` sampled.
        tools: as given when `turn` was sampled.
    """
    thought = any("thinking" in message for message in messages[: replied + 1])
    if thought and not chat.keeps_thinking:
        return None
    before = [_brief(message) if place else message for place, message in enumerate(messages[:replied])]
    stand_ins = [chat.render([*before, _reply(text), *messages[replied + 1 :]], tools) for text in ("0", "x")]
    common = _common_tail(stand_ins[0].tokens, stand_ins[1].tokens)
    tail = stand_ins[0].after(len(stand_ins[0]) - common)
    written = _overlap(turn.completion, tail.tokens) if turn.stop == "stop" else 0
    return known + tail.after(written)


def _reply(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _brief(message: Message) -> Message:
    """A message of the same kind that says next to nothing."""
    if message["role"] == "system":  # some templates look for switches in it
        return message
    brief: Message = {**message, "content": "0"}
    if "thinking" in brief:
        brief["thinking"] = "0"
    return brief


def _common_tail(a: Tokens, b: Tokens) -> int:
    count = min(len(a), len(b))
    differ = np.flatnonzero(a[::-1][:count] != b[::-1][:count])
    return int(differ[0]) if len(differ) else count


def _overlap(completion: Tokens, tail: Tokens) -> int:
    """How many tokens of the tail the completion already ends with (its stop token or string)."""
    for count in range(min(len(completion), len(tail)), 0, -1):
        if np.array_equal(completion[-count:], tail[:count]):
            return count
    return 0


THINKING = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)\s*", re.DOTALL)
"""A reasoning block at the head of a reply; one that was cut off runs to the end."""

TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""A tool call in the notation that most open chat templates share (Hermes)."""

MAX_NESTING = 64
"""Tool-call arguments nested deeper are malformed: what copies or writes them recurses, and stacks end."""


def parse_text(text: str) -> Parsed:
    """Read a reply in the notation of most chat templates: `<think>` first, `<tool_call>` with JSON anywhere."""
    message: Message = {"role": "assistant", "content": text}
    if thought := THINKING.match(text):
        message["thinking"] = thought[1].strip()
        text = text[thought.end() :]
    calls, malformed = list[ToolCall](), list[str]()
    for block in TOOL_CALL.findall(text):
        call = _read_call(block, number=len(calls))
        if call is None:
            malformed.append(block.strip())
        else:
            calls.append(call)
    message["content"] = TOOL_CALL.sub("", text).strip() if calls or malformed else text.strip()
    if calls:
        message["tool_calls"] = calls
    return Parsed(message, tuple(malformed))


def _read_call(block: str, *, number: int) -> ToolCall | None:
    import json

    try:
        call = json.loads(block)
        # what cannot be written again would fail later, in a prompt or in the journal: NaN, infinity, a lone surrogate
        json.dumps(call, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # a model may nest brackets deeper than the parser's stack
        return None
    match call:
        case {"name": str(name), "arguments": dict()} if _nests_within(MAX_NESTING, call["arguments"]):
            return {"id": f"call_{number}", "name": name, "arguments": call["arguments"]}
        case _:
            return None


def _nests_within(levels: int, value: Json) -> bool:
    match value:
        case dict():
            inner = list(value.values())
        case list():
            inner = value
        case _:
            return True
    return levels > 0 and all(_nests_within(levels - 1, item) for item in inner)
