"""What servers say, as messages for a model.

Invariant: nothing that a server says is dropped on the way: a part that has no place in a conversation is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from rlkit.errors import EnvironmentFault
from rlkit.types import ImagePart, Json, Message, TextPart, Tool, ToolCall

if TYPE_CHECKING:
    from openreward.api.environments.types import (
        ImageBlock,
        MessageBlock,
        TextBlock,
        ToolCallBlock,
        ToolSpec,
    )
    from openreward.api.environments.types import Message as ServerMessage

type Clean = Callable[[str], str]
"""Takes secrets out of a text."""

type Content = str | list[TextPart | ImagePart]

NO_ARGUMENTS: Mapping[str, Json] = {"type": "object", "properties": {}}


def tool_of(spec: ToolSpec) -> Tool:
    """A tool as the model is shown it."""
    parameters = cast("Mapping[str, Json] | None", spec.input_schema)
    return {"name": spec.name, "description": spec.description or "", "parameters": parameters or NO_ARGUMENTS}


def content_of(blocks: Sequence[object], clean: Clean) -> Content:
    """Blocks of text and images: a text where there are only texts.

    Raises:
        EnvironmentFault: a block is of another type.
    """
    parts = [_part(block, clean) for block in blocks]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def messages_of(messages: Sequence[ServerMessage], clean: Clean) -> list[Message]:
    """The conversation that a task begins with.

    Raises:
        EnvironmentFault: it has a block where no model could be shown it.
    """
    found = list[Message]()
    for message in messages:
        found += _assistant(message.blocks, clean) if message.role == "assistant" else _other(message, clean)
    return found


def _assistant(blocks: Sequence[MessageBlock], clean: Clean) -> list[Message]:
    shown = [block for block in blocks if block.type not in ("reasoning", "tool_call")]
    made: Message = {"role": "assistant", "content": content_of(shown, clean) if shown else ""}
    thoughts = [clean(block.text) for block in blocks if block.type == "reasoning"]
    calls = [_call(block) for block in blocks if block.type == "tool_call"]
    if thoughts:
        made["thinking"] = "\n\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return [made]


def _call(block: ToolCallBlock) -> ToolCall:
    return {"id": block.id, "name": block.name, "arguments": cast("Mapping[str, Json]", block.input)}


def _other(message: ServerMessage, clean: Clean) -> list[Message]:
    """What the results of tools stand among comes after them, as chat formats have it."""
    results = [block for block in message.blocks if block.type == "tool_result"]
    rest = [block for block in message.blocks if block.type != "tool_result"]
    made: list[Message] = [
        {"role": "tool", "content": content_of(result.blocks, clean), "tool_call_id": result.tool_call_id}
        for result in results
    ]
    if rest or not results:
        made.append({"role": message.role, "content": content_of(rest, clean)})
    return made


def _part(block: object, clean: Clean) -> TextPart | ImagePart:
    match getattr(block, "type", None):
        case "text":
            return {"type": "text", "text": clean(cast("TextBlock", block).text)}
        case "image":
            image = cast("ImageBlock", block)
            return {"type": "image", "image": f"data:{image.mimeType};base64,{image.data}"}
        case other:
            raise EnvironmentFault(f"the server sent a block of type {other!r} where only text and images have a place")


def readable(messages: Sequence[Message]) -> list[Json]:
    """Messages for people and records, with the place of each image in its stead."""
    return [_readable(message) for message in messages]


def _readable(message: Message) -> Json:
    kept = cast("dict[str, Json]", dict(message))
    content = message["content"]
    if not isinstance(content, str):
        kept["content"] = "\n".join(part["text"] if part["type"] == "text" else "[image]" for part in content)
    return kept
