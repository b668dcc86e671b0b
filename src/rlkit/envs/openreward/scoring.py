"""The episodes of a group as candidates that a server compares with each other.

Invariant: a candidate is what was recorded of its episode. What a server of an older version does not take is left out,
and never what the model said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rlkit.types import Episode

if TYPE_CHECKING:
    from openreward.api.environments.types import Message, MessageBlock


def candidate_of(episode: Episode, *, plain: bool) -> list[Message]:
    """The conversation of an episode as a server takes it.

    Args:
        episode: with its messages in its record.
        plain: texts only: without thoughts, calls and what tools said.
    """
    from openreward.api.environments.types import Message

    made = list[Message]()
    for message in cast("Sequence[Mapping[str, Any]]", episode.info["messages"]):
        blocks = _blocks(message, plain)
        if blocks:
            made.append(Message("user" if message["role"] == "tool" else message["role"], blocks))
    return made


def _blocks(message: Mapping[str, Any], plain: bool) -> list[MessageBlock]:
    from openreward.api.environments.types import ReasoningBlock, TextBlock, ToolCallBlock, ToolResultBlock

    text = TextBlock(message["content"])
    if message["role"] == "tool":
        return [] if plain else [ToolResultBlock(message["tool_call_id"], [text])]
    blocks: list[MessageBlock] = [text] if text.text else []
    if message["role"] == "assistant" and not plain:
        if thoughts := message.get("thinking"):
            blocks.insert(0, ReasoningBlock(thoughts))
        blocks += [ToolCallBlock(call["id"], call["name"], call["arguments"]) for call in message.get("tool_calls", [])]
    return blocks
