"""Conversion between blocks of servers and messages for a model.

Invariant: no block from a server is dropped; a block that is not supported in a conversation raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rlkit._util.json_values import map_text
from rlkit.errors import EnvironmentFault
from rlkit.types import Episode, ImagePart, Json, Message, TextPart, Tool, ToolCall

if TYPE_CHECKING:
    from openreward.api.environments.types import ImageBlock, MessageBlock, TextBlock, ToolCallBlock, ToolSpec
    from openreward.api.environments.types import Message as ServerMessage

type Clean = Callable[[str], str]
"""Function that removes secrets from a text."""

type Content = str | list[TextPart | ImagePart]

NO_ARGUMENTS: Mapping[str, Json] = {"type": "object", "properties": {}}


def convert_tool(spec: ToolSpec, clean: Clean) -> Tool:
    """Return a tool in the form for the model.

    Raises:
        EnvironmentFault: its description is not a text, or its arguments have no JSON schema.
    """
    name, description, schema = cast("tuple[object, object, object]", (spec.name, spec.description, spec.input_schema))
    if not isinstance(name, str) or not isinstance(description, str | None):
        raise EnvironmentFault(f"the server described a tool as {name!r}: {description!r}, which are not texts")
    if not isinstance(schema, Mapping | None):
        raise EnvironmentFault(f"the server described the arguments of {name} as {schema!r}, not with a JSON schema")
    parameters = cast("Mapping[str, Json]", map_text(cast("Json", schema), clean)) if schema else NO_ARGUMENTS
    return {"name": name, "description": clean(description or ""), "parameters": parameters}


def convert_content(blocks: Sequence[object], clean: Clean) -> Content:
    """Return blocks as parts, or as one text if there are only texts; EnvironmentFault for a block of another type."""
    parts = [_convert_part(block, clean) for block in blocks]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def convert_messages(messages: Sequence[ServerMessage], clean: Clean) -> list[Message]:
    """Return the initial conversation of a task.

    Raises:
        EnvironmentFault: it is empty, or has an unsupported message or block.
    """
    converted, names = list[Message](), dict[str, str]()
    for message in messages:
        if message.role not in ("system", "user", "assistant"):
            raise EnvironmentFault(
                f"the server sent a message of {message.role!r}, which has no part in a conversation"
            )
        if message.role == "assistant":
            converted.append(_convert_assistant(message.blocks, clean))
            names |= {call["id"]: call["name"] for call in converted[-1].get("tool_calls", [])}
        else:
            converted += _convert_other(message, clean, names)
    if not converted:
        raise EnvironmentFault("the server sent no message to begin with")
    return converted


def _convert_assistant(blocks: Sequence[MessageBlock], clean: Clean) -> Message:
    visible = [block for block in blocks if block.type not in ("reasoning", "tool_call")]
    converted: Message = {"role": "assistant", "content": convert_content(visible, clean) if visible else ""}
    thoughts = [clean(block.text) for block in blocks if block.type == "reasoning"]
    calls = [_convert_call(block, clean) for block in blocks if block.type == "tool_call"]
    if thoughts:
        converted["thinking"] = "\n\n".join(thoughts)
    if calls:
        converted["tool_calls"] = calls
    return converted


def _convert_call(block: ToolCallBlock, clean: Clean) -> ToolCall:
    arguments = cast("Mapping[str, Json]", map_text(cast("Json", block.input), clean))
    return {"id": block.id, "name": block.name, "arguments": arguments}


def _convert_other(message: ServerMessage, clean: Clean, names: Mapping[str, str]) -> list[Message]:
    """Convert a message; tool results come first and name their tool, as chat formats require."""
    results = [block for block in message.blocks if block.type == "tool_result"]
    rest = [block for block in message.blocks if block.type != "tool_result"]
    converted = list[Message]()
    for result in results:
        call = result.tool_call_id
        tool_message: Message = {"role": "tool", "content": convert_content(result.blocks, clean), "tool_call_id": call}
        converted.append({**tool_message, "name": names[call]} if call in names else tool_message)
    if rest or not results:
        converted.append({"role": message.role, "content": convert_content(rest, clean)})
    return converted


def _convert_part(block: object, clean: Clean) -> TextPart | ImagePart:
    match getattr(block, "type", None):
        case "text":
            text = cast("object", cast("TextBlock", block).text)
            if not isinstance(text, str):
                raise EnvironmentFault(f"the server sent {text!r} where a text has its place")
            return {"type": "text", "text": clean(text)}
        case "image":
            image = cast("ImageBlock", block)
            return {"type": "image", "image": f"data:{image.mimeType};base64,{image.data}"}
        case other:
            raise EnvironmentFault(f"the server sent a block of type {other!r} where only text and images have a place")


def make_readable(messages: Sequence[Message]) -> list[Json]:
    """Return messages for people and records, with a placeholder for each image."""
    return [cast("Json", {**message, "content": _make_text(message["content"])}) for message in messages]


def _make_text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else "[image]" for part in content)


def make_candidate(episode: Episode) -> list[ServerMessage]:
    """Return the recorded conversation of an episode in the server's form, for comparing episodes."""
    from openreward.api.environments.types import Message as ServerMessage

    converted = list[ServerMessage]()
    for message in cast("Sequence[Mapping[str, Any]]", episode.info["messages"]):
        if blocks := _make_blocks(message):
            converted.append(ServerMessage("user" if message["role"] == "tool" else message["role"], blocks))
    return converted


def _make_blocks(message: Mapping[str, Any]) -> list[MessageBlock]:
    from openreward.api.environments.types import ReasoningBlock, TextBlock, ToolCallBlock, ToolResultBlock

    text = TextBlock(message["content"])
    if message["role"] == "tool":
        return [ToolResultBlock(message["tool_call_id"], [text])]
    blocks: list[MessageBlock] = [text] if text.text else []
    if message["role"] == "assistant":
        if thoughts := message.get("thinking"):
            blocks.insert(0, ReasoningBlock(thoughts))
        blocks += [ToolCallBlock(call["id"], call["name"], call["arguments"]) for call in message.get("tool_calls", [])]
    return blocks
