"""The protocol of chat formats: messages become a prompt, and a completion becomes a message.

Invariant: the prompt of a follow-up turn extends the exact tokens of the turn before it, or is refused. Text that was
rendered, sampled and parsed is never tokenised again in the place of the sampled tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlkit.chat.thinking_budget import end_of_thinking
from rlkit.types import Json, Message, Prompt, Tokens, Tool, ToolCall, Turn

TAIL_TOKENS = 32
"""Tokens at the end of a prompt that tell whether the model is thinking there."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A completion as a message, and the raw texts of tool calls that could not be parsed."""

    message: Message
    malformed_tool_calls: tuple[str, ...] = ()


class ChatFormat(Protocol):
    """The notation of one model's conversations."""

    stop: tuple[str, ...] | tuple[int, ...]
    """Strings or tokens that end an assistant's turn."""

    keeps_thinking: bool
    """True if an earlier turn's thinking stays in later prompts."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """Return the prompt for the assistant's next message."""
        ...

    def parse(self, completion: Tokens) -> Parsed:
        """Return the message of a completion; never raises, whatever a model wrote."""
        ...

    def last_words(self, prompt: Prompt, completion: Tokens, phrase: str) -> Tokens:
        """Return the tokens that end the thinking of a truncated reply and open its answer; none if it is answering."""
        text = self.decode(np.concatenate([prompt.tokens[-TAIL_TOKENS:], completion]))
        return self.encode(end_of_thinking(text, phrase))

    def encode(self, text: str) -> Tokens:
        """Return plain text as tokens, without special ones."""
        ...

    def decode(self, tokens: Tokens) -> str:
        """Return tokens as text, without special ones."""
        ...


def extend(
    chat: ChatFormat, prefix: Prompt, turn: Turn, messages: Sequence[Message], *, replied: int, tools: Sequence[Tool]
) -> Prompt | None:
    """Return the prompt for `messages` as an extension of the exact tokens `prefix`, or None if the format has none.

    The text that a format writes after an assistant's message depends neither on that message nor on the texts before
    it. The conversation is rendered twice with short texts, and with two different replies in the place of the sampled
    one. The longest common tail of the two is the end of the reply's turn, the new messages and the header of the next
    turn. It follows `prefix` token for token.

    Args:
        prefix: the prompt and completion of `turn`.
        messages: the whole conversation; message `replied` is the one that `turn` sampled.
        tools: the tools of `turn`.
    """
    if not chat.keeps_thinking and any("thinking" in message for message in messages[: replied + 1]):
        return None
    history = [_shorten(message) if index else message for index, message in enumerate(messages[:replied])]
    replies: list[Message] = [{"role": "assistant", "content": text} for text in ("0", "x")]
    first, second = (chat.render([*history, reply, *messages[replied + 1 :]], tools) for reply in replies)
    tail = first.drop_first(len(first) - _common_tail(first.tokens, second.tokens))
    overlap = _overlap(turn.completion, tail.tokens) if turn.stop == "stop" else 0
    return prefix + tail.drop_first(overlap)


def _shorten(message: Message) -> Message:
    """Return a message of the same kind with a text of one token."""
    if message["role"] == "system":  # some templates look for switches in it
        return message
    short: Message = {**message, "content": "0"}
    if "thinking" in short:
        short["thinking"] = "0"
    return short


def _common_tail(a: Tokens, b: Tokens) -> int:
    """Count the tokens at the end that both have."""
    count = min(len(a), len(b))
    differ = np.flatnonzero(a[::-1][:count] != b[::-1][:count])
    return int(differ[0]) if len(differ) else count


def _overlap(completion: Tokens, tail: Tokens) -> int:
    """Count the tokens of the tail that the completion already ends with: its stop token or string."""
    for count in range(min(len(completion), len(tail)), 0, -1):
        if np.array_equal(completion[-count:], tail[:count]):
            return count
    return 0


THINKING = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)\s*", re.DOTALL)
"""A reasoning block at the head of a reply; one that was cut off runs to the end."""

TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""A tool call in the notation that most open chat templates share (Hermes)."""

MAX_NESTING = 64
"""Tool-call arguments nested deeper are malformed: copying or writing them recurses, and stacks end."""


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
    try:
        call = json.loads(block)
        # NaN, infinity and lone surrogates could not be written again, to a prompt or to the journal
        json.dumps(call, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # a model may nest brackets deeper than the parser's stack
        return None
    match call:
        case {"name": str(name), "arguments": dict()} if _nests_within(MAX_NESTING, call["arguments"]):
            return {"id": f"call_{number}", "name": name, "arguments": call["arguments"]}
        case _:
            return None


def _nests_within(levels: int, value: Json) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_nests_within(levels - 1, item) for item in inner)
