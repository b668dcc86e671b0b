"""What servers say, as messages for a model, and the other way round.

Invariant: nothing that a server says is dropped on the way: a part that has no place in a conversation is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rlkit._util.json_values import map_text
from rlkit.errors import EnvironmentFault
from rlkit.types import Episode, ImagePart, Json, Message, TextPart, Tool, ToolCall

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


def tool_of(spec: ToolSpec, clean: Clean) -> Tool:
    """A tool as the model is shown it.

    Raises:
        EnvironmentFault: it is described in a way that no model could be shown.
    """
    name, description, schema = cast("tuple[object, object, object]", (spec.name, spec.description, spec.input_schema))
    if not isinstance(name, str) or not isinstance(description, str | None):
        raise EnvironmentFault(f"the server described a tool as {name!r}: {description!r}, which are no texts")
    if not isinstance(schema, Mapping | None):
        raise EnvironmentFault(f"the server described the arguments of {name} as {schema!r}, which is no JSON schema")
    parameters = cast("Mapping[str, Json]", map_text(cast("Json", schema), clean)) if schema else NO_ARGUMENTS
    return {"name": name, "description": clean(description or ""), "parameters": parameters}


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
        EnvironmentFault: it is empty, or has a part where no model could be shown it.
    """
    found, names = list[Message](), dict[str, str]()
    for message in messages:
        if message.role not in ("system", "user", "assistant"):
            raise EnvironmentFault(
                f"the server sent a message of {message.role!r}, which has no part in a conversation"
            )
        if message.role == "assistant":
            found.append(_assistant(message.blocks, clean))
            names |= {call["id"]: call["name"] for call in found[-1].get("tool_calls", [])}
        else:
            found += _other(message, clean, names)
    if not found:
        raise EnvironmentFault("the server sent no message to begin with")
    return found


def _assistant(blocks: Sequence[MessageBlock], clean: Clean) -> Message:
    shown = [block for block in blocks if block.type not in ("reasoning", "tool_call")]
    made: Message = {"role": "assistant", "content": content_of(shown, clean) if shown else ""}
    thoughts = [clean(block.text) for block in blocks if block.type == "reasoning"]
    calls = [_call(block, clean) for block in blocks if block.type == "tool_call"]
    if thoughts:
        made["thinking"] = "\n\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _call(block: ToolCallBlock, clean: Clean) -> ToolCall:
    arguments = cast("Mapping[str, Json]", map_text(cast("Json", block.input), clean))
    return {"id": block.id, "name": block.name, "arguments": arguments}


def _other(message: ServerMessage, clean: Clean, names: Mapping[str, str]) -> list[Message]:
    """What the results of tools stand among comes after them, as chat formats have it; some name the tool, too."""
    results = [block for block in message.blocks if block.type == "tool_result"]
    rest = [block for block in message.blocks if block.type != "tool_result"]
    made = list[Message]()
    for result in results:
        call = result.tool_call_id
        told: Message = {"role": "tool", "content": content_of(result.blocks, clean), "tool_call_id": call}
        made.append({**told, "name": names[call]} if call in names else told)
    if rest or not results:
        made.append({"role": message.role, "content": content_of(rest, clean)})
    return made


def _part(block: object, clean: Clean) -> TextPart | ImagePart:
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


def readable(messages: Sequence[Message]) -> list[Json]:
    """Messages for people and records, with the place of each image in its stead."""
    return [_readable(message) for message in messages]


def _readable(message: Message) -> Json:
    kept = cast("dict[str, Json]", dict(message))
    content = message["content"]
    if not isinstance(content, str):
        kept["content"] = "\n".join(part["text"] if part["type"] == "text" else "[image]" for part in content)
    return kept


def candidate_of(episode: Episode, *, plain: bool) -> list[ServerMessage]:
    """Return the recorded conversation of an episode as a server takes it, so that it can compare episodes.

    Args:
        plain: texts only, for servers of an older version: no thoughts, calls or results of tools.
    """
    from openreward.api.environments.types import Message as ServerMessage

    made = list[ServerMessage]()
    for message in cast("Sequence[Mapping[str, Any]]", episode.info["messages"]):
        blocks = _blocks(message, plain)
        if blocks:
            made.append(ServerMessage("user" if message["role"] == "tool" else message["role"], blocks))
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
