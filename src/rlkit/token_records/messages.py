"""The messages of a turn, as a run records them for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from rlkit.types import ImagePart, Message, TextPart, Turn


def new_messages(conversation: Sequence[Message], turn: Turn, turns: Sequence[Turn]) -> tuple[Message, ...]:
    """Return the messages of a turn's conversation that its parent's conversation lacks.

    Args:
        conversation: all messages up to the reply.
        turns: turns of the episode before this turn.
    """
    parent, parent_messages = turn.parent, 0
    while parent is not None:
        parent_messages += len(turns[parent].messages)
        parent = turns[parent].parent
    messages = tuple(conversation[parent_messages:])
    return _number_images(messages) if turn.prompt.images else messages


def _number_images(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages with `#n` in the place of image n, whose data the prompt holds."""
    numbers = count()

    def number_part(part: TextPart | ImagePart) -> TextPart | ImagePart:
        return {"type": "image", "image": f"#{next(numbers)}"} if part["type"] == "image" else part

    def number_parts(message: Message) -> Message:
        content = message["content"]
        return message if isinstance(content, str) else {**message, "content": list(map(number_part, content))}

    return tuple(map(number_parts, messages))
