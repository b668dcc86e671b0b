"""Protocol of chat formats: render messages as a prompt, and parse a completion as a message.

Invariant: the prompt of a follow-up turn extends the exact tokens of the previous turn, or there is no extension.
Sampled tokens are never replaced by a tokenisation of their text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlkit.chat.thinking_budget import end_of_thinking
from rlkit.types import Json, Message, Prompt, TokenPiece, Tokens, Tool, ToolCall, Turn

TAIL_TOKENS = 32
"""Number of tokens at the end of a prompt in which to look for the start of thinking."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A completion as a message, and the raw texts of tool calls that could not be parsed."""

    message: Message
    malformed_tool_calls: tuple[str, ...] = ()


class ChatFormat(Protocol):
    """The notation of a model's conversations."""

    stop: tuple[str, ...] | tuple[int, ...]
    """Strings or tokens that end an assistant's turn."""

    keeps_thinking: bool
    """True if later prompts keep the thinking of earlier turns."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, whole: bool = False) -> Prompt:
        """Return the prompt for the assistant's next message; a `whole` conversation has no beginning of one."""
        ...

    def render_reply(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt | None:
        """Return the tokens of the last message, a reply, after the prompt for it; None if the prompt has others."""
        prompt, whole = self.render(messages[:-1], tools), self.render(messages, tools, whole=True)
        return whole.drop_first(len(prompt)) if whole.starts_with(prompt) else None

    def parse(self, completion: Tokens) -> ParsedReply:
        """Return the message of a completion; never raises."""
        ...

    def close_thinking(self, prompt: Prompt, completion: Tokens, phrase: str) -> Tokens:
        """Return tokens that end the thinking of a truncated reply and open its answer; none if it is answering."""
        text = self.decode(np.concatenate([prompt.tokens[-TAIL_TOKENS:], completion]))
        return self.encode(end_of_thinking(text, phrase))

    def encode(self, text: str) -> Tokens:
        """Return plain text as tokens, without special tokens."""
        ...

    def decode(self, tokens: Tokens) -> str:
        """Return tokens as text, without special tokens."""
        ...

    def piece(self, token: int) -> TokenPiece:
        """Return the text of a single token, for people."""
        text = self.decode(np.array([token], np.int32))
        return TokenPiece(text.encode() or f"<{token}>".encode(), not text)


def extend(
    chat: ChatFormat, prefix: Prompt, turn: Turn, messages: Sequence[Message], *, replied: int, tools: Sequence[Tool]
) -> Prompt | None:
    """Return the prompt for `messages` as an extension of the exact tokens `prefix`, or None if the format has none.

    The text after an assistant's message depends neither on that message nor on earlier texts. So the conversation is
    rendered twice, with short texts and two different replies in place of the sampled reply. The longest common tail is
    the end of the reply's turn, the new messages and the header of the next turn. It is appended to `prefix`.

    Args:
        prefix: prompt and completion of `turn`.
        messages: the whole conversation; `turn` sampled the message with index `replied`.
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
    """Return a message of the same kind with a one-token text."""
    if message["role"] == "system":  # some templates look for switches in the system message
        return message
    short: Message = {**message, "content": "0"}
    if "thinking" in short:
        short["thinking"] = "0"
    return short


def _common_tail(a: Tokens, b: Tokens) -> int:
    """Return the length of the longest common suffix."""
    count = min(len(a), len(b))
    differ = np.flatnonzero(a[::-1][:count] != b[::-1][:count])
    return int(differ[0]) if len(differ) else count


def _overlap(completion: Tokens, tail: Tokens) -> int:
    """Return the number of tokens that end the completion and begin the tail, such as a stop token."""
    counts = np.flatnonzero(tail[: len(completion)] == completion[-1:])[::-1] + 1  # the last tokens agree at these
    return next((int(count) for count in counts if np.array_equal(completion[-count:], tail[:count])), 0)


THINKING = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)\s*", re.DOTALL)
"""A reasoning block at the beginning of a reply; a truncated block extends to the end."""

TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""A tool call in the notation of most open chat templates (Hermes)."""

MAX_NESTING = 64
"""Maximum depth of tool-call arguments: copying and writing them is recursive, and the stack is limited."""


def parse_text(text: str) -> ParsedReply:
    """Parse a reply in the notation of most chat templates: `<think>` first, `<tool_call>` with JSON anywhere."""
    message: Message = {"role": "assistant", "content": text}
    if thought := THINKING.match(text):
        message["thinking"] = thought[1].strip()
        text = text[thought.end() :]
    calls, malformed = list[ToolCall](), list[str]()
    for block in TOOL_CALL.findall(text):
        match load_call(block, levels=MAX_NESTING + 1):
            case {"name": str(name), "arguments": dict(arguments)}:
                calls.append({"id": f"call_{len(calls)}", "name": name, "arguments": arguments})
            case _:
                malformed.append(block.strip())
    message["content"] = TOOL_CALL.sub("", text).strip() if calls or malformed else text.strip()
    if calls:
        message["tool_calls"] = calls
    return ParsedReply(message, tuple(malformed))


def load_call(text: str, *, levels: int) -> Json:
    """Parse a tool call, or its arguments, of a reply; None if it is not JSON that prompts and the journal can hold."""
    try:
        value: Json = json.loads(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # rejects NaN, infinity and lone surrogates
    except (ValueError, RecursionError):  # brackets nested deeper than the parser's stack
        return None
    return value if _nests_within(levels, value) else None


def _nests_within(levels: int, value: Json) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_nests_within(levels - 1, item) for item in inner)
