"""Conversations that somebody else wrote, as prompts and completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import cast

import numpy as np

from rlkit.chat.format import ChatFormat
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.types import Message, Prompt, Tokens, Tool, as_prompt

_WEIGHT_MAX = 1e6


def choose_trained(messages: Sequence[Message], roles: Sequence[str] = ("assistant",)) -> list[int]:
    """Return the indices of the messages of these roles with a weight; ValueError for a weight that is none."""
    weights = [cast("object", message.get("weight", 1)) for message in messages]
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= _WEIGHT_MAX:
            raise ValueError(f"a message has the weight {weight!r}: it is a number from 0 to {_WEIGHT_MAX:g}")
    return [index for index, message in enumerate(messages) if message["role"] in roles and weights[index]]


def split_conversation(
    chat: ChatFormat, messages: Sequence[Message], tools: Sequence[Tool], indices: Sequence[int]
) -> Iterator[tuple[int, Prompt, Tokens]]:
    """Yield the index of each of these messages, its prompt, and its tokens.

    The tokens of a reply follow the prompt for it, up to its stop token; other messages have the header of their role.

    Raises:
        EnvironmentFault: a message has an image, or the format has no prompt that its reply extends.
    """
    for index in indices:
        role, before = messages[index]["role"], messages[:index]
        if role == "assistant":
            if not before:
                raise EnvironmentFault("a conversation begins with a reply: put a message of the user before it")
            prompt, tail = chat.render(before, tools), chat.render_reply(messages[: index + 1], tools)
        elif not before and role != "system":
            prompt, tail = _split_first(chat, messages[index], tools)
        else:
            prompt, whole = as_prompt(()), chat.render(messages[: index + 1], tools, whole=True)
            prompt = chat.render(before, tools, whole=True) if before else prompt
            tail = whole.drop_first(len(prompt)) if whole.starts_with(prompt) else None
        if tail is None or not len(tail) or tail.images:
            problem = "an image" if tail and tail.images else "no tokens after its prompt in this chat format"
            raise EnvironmentFault(f"message {index}, of the role {role}, has {problem}: leave it out")
        ends = np.flatnonzero(np.isin(tail.tokens, [stop for stop in chat.stop if isinstance(stop, int)]))
        # a template may write a line break after the stop token, which no model samples
        yield index, prompt, tail.tokens[: ends[-1] + 1] if role == "assistant" and len(ends) else tail.tokens


def _split_first(chat: ChatFormat, message: Message, tools: Sequence[Tool]) -> tuple[Prompt, Prompt | None]:
    """Return what the format writes before a first message, such as its default system prompt, and the message.

    The message is what the format adds for it to another conversation; None if that is not the end of its own.
    """
    whole, reply = chat.render([message], tools, whole=True), Message(role="assistant", content="0")
    for before in ([message], [Message(role="system", content="0")], [message, reply]):
        with suppress(EnvironmentFault, UsageError):  # not every template writes each of these
            head, both = chat.render(before, tools, whole=True), chat.render([*before, message], tools, whole=True)
            tail = both.drop_first(len(head))
            if both.starts_with(head) and len(tail) and np.array_equal(whole.tokens[-len(tail) :], tail.tokens):
                return Prompt(whole.tokens[: -len(tail)]), tail
    return whole, None
