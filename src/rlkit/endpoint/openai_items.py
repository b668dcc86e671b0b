"""Items of OpenAI's responses: a client's input as messages, and a reply as output.

Invariant: the items of a reply are its message again when the client sends them back unchanged. Their ids hold a tag of
the response, so that items of two responses never become one message.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, override

from pydantic import BaseModel, ConfigDict, Field

from rlkit.endpoint.protocol import (
    ContentPart,
    Items,
    Text,
    check_image_url,
    make_unique_id,
    parse_arguments,
    parse_content,
    read_tag,
    read_unique_id,
)
from rlkit.endpoint.rejection import Rejection
from rlkit.types import ImagePart, Json, Message, Reply, Tool, ToolCall

_OPAQUE = "rlkit:"  # prefix of reasoning as opaque text: some clients keep it, and drop the plain text


class _Image(ContentPart):
    type: Literal["input_image"]
    image_url: str

    @override
    def parse(self) -> ImagePart:
        return {"type": "image", "image": check_image_url(self.image_url, field="input")}


type _Content = str | Items[Annotated[Text | _Image, Field(discriminator="type")]]


class _Message(BaseModel):
    type: Literal["message"]
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content


class _Reasoning(BaseModel):
    type: Literal["reasoning"]
    id: str | None = None
    summary: Items[Text] = []
    content: Items[Text] | None = None
    encrypted_content: str | None = None

    def parse(self) -> str | None:
        """Return the reasoning's text; None if this endpoint cannot read it."""
        opaque = self.encrypted_content or ""
        if self.content or not opaque.startswith(_OPAQUE):
            texts = [part.text for part in self.content or self.summary]
            return "\n\n".join(texts) if texts else None
        try:
            return b64decode(opaque.removeprefix(_OPAQUE), validate=True).decode()
        except ValueError:
            raise Rejection(400, "encrypted_content was changed", field="input") from None


class _Call(BaseModel):
    type: Literal["function_call", "custom_tool_call"]
    id: str | None = None
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = ""
    input: str | None = None

    def parse(self) -> ToolCall:
        """Return the call in rlkit's shape; a custom tool has an input instead of arguments."""
        arguments = {"input": self.input} if self.input is not None else None
        return {
            "id": read_unique_id(self.call_id),
            "name": _qualify(self.namespace, self.name),
            "arguments": arguments or parse_arguments(self.call_id, self.arguments, field="input"),
        }


class _CallOutput(BaseModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: _Content


type Item = Annotated[_Message | _Reasoning | _Call | _CallOutput, Field(discriminator="type")]
"""An item of a client's input."""

_RANKS = {_Reasoning: 0, _Message: 1, _Call: 2}  # order of the items of a reply: reasoning, one message, calls


@dataclass(slots=True)
class _Assembly:
    """An assistant's message that further items may complete."""

    message: Message
    rank: int = -1  # rank of the newest item
    tag: str | None = None  # tag of the response; None if no item had one

    def add(self, item: _Reasoning | _Message | _Call) -> None:
        """Complete the message by an item."""
        self.rank = _RANKS[type(item)]
        match item:
            case _Reasoning():
                if (thinking := item.parse()) is not None:
                    self.message["thinking"] = thinking
            case _Message():
                self.message["content"] = parse_content(item.content)
            case _Call():
                self.message.setdefault("tool_calls", []).append(item.parse())


def read_messages(items: Sequence[Item]) -> list[Message]:
    """Return the messages of a client's input; the items of a reply become one message, in the first item's place."""
    messages, newest, by_tag = list[Message](), None, dict[str, _Assembly]()
    for item in items:
        if isinstance(item, _CallOutput):
            output, call_id = parse_content(item.output), read_unique_id(item.call_id)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            newest = None
            continue
        if isinstance(item, _Message) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": parse_content(item.content)})
            newest = None
            by_tag.clear()
            continue
        tag = read_tag(item.id) or (read_tag(item.call_id) if isinstance(item, _Call) else None)
        # Clients may drop some ids, and may put outputs between parallel calls.
        reply = by_tag.get(tag or "")
        if reply is None and newest is not None and None in {tag, newest.tag}:
            reply = newest
        if reply is None or not (isinstance(item, _Call) or _RANKS[type(item)] > reply.rank):
            reply = _Assembly({"role": "assistant", "content": ""})
            messages.append(reply.message)
        reply.add(item)
        reply.tag, newest = reply.tag or tag, reply
        if tag is not None:
            by_tag[tag] = reply
    return messages


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the model sees it, with its name and kind at the client."""

    tool: Tool
    name: str
    namespace: str | None
    is_custom: bool


class _Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function", "custom"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None

    def offer(self, namespace: str | None = None) -> Iterator[OfferedTool]:
        """Yield the tool; a custom tool is a function of one text, whose grammar is described and not enforced."""
        is_custom, parameters = self.type == "custom", self.parameters or {"type": "object", "properties": {}}
        if is_custom:
            grammar = (self.format or {}).get("definition")
            text = {"type": "string", **({"description": f"Text of the grammar:\n{grammar}"} if grammar else {})}
            parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        name = _qualify(namespace, self.name)
        tool: Tool = {"name": name, "description": self.description or "", "parameters": parameters}
        yield OfferedTool(tool, self.name, namespace, is_custom)


class _OtherTool(BaseModel):
    """A namespace, which the model sees in the names of its tools, or a tool that Codex offers and the policy lacks."""

    model_config = ConfigDict(extra="allow")

    type: Literal["namespace", "tool_search", "web_search"]
    name: str = ""
    tools: Items[_Tool] = []

    def offer(self) -> Iterator[OfferedTool]:
        """Yield the tools of a namespace."""
        for tool in self.tools:
            yield from tool.offer(self.name)


type ToolItem = Annotated[_Tool | _OtherTool, Field(discriminator="type")]
"""A tool of a request."""


def _qualify(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}__{name}"


def encode_reply(
    reply: Reply, *, tag: str, tools: Mapping[str, OfferedTool], with_opaque_reasoning: bool
) -> list[dict[str, Json]]:
    """Return the items of a reply.

    Args:
        tools: tools of the request by the name that the model sees.
        with_opaque_reasoning: repeat the reasoning as `encrypted_content`.
    """
    items = list[dict[str, Json]]()
    if "thinking" in reply.message:
        opaque = _OPAQUE + b64encode(reply.thinking.encode()).decode() if with_opaque_reasoning else None
        content: Json = [{"type": "reasoning_text", "text": reply.thinking}]
        items.append({"type": "reasoning", "summary": [], "content": content, "encrypted_content": opaque})
    if reply.text or not (items or reply.tool_calls):
        content = [{"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}]
        items.append({"type": "message", "role": "assistant", "content": content})
    items += [_encode_call(call, tag, tools.get(call["name"])) for call in reply.tool_calls]
    for index, item in enumerate(items):
        item["id"] = make_unique_id(f"{item['type']}_{index}", tag)
        item["status"] = "incomplete" if reply.truncated else "completed"
    return items


def _encode_call(call: ToolCall, tag: str, tool: OfferedTool | None) -> dict[str, Json]:
    item: dict[str, Json] = {"call_id": make_unique_id(call["id"], tag), "name": tool.name if tool else call["name"]}
    if tool is not None and tool.namespace is not None:
        item["namespace"] = tool.namespace
    match call["arguments"]:
        case {"input": str(text), **others} if tool is not None and tool.is_custom and not others:
            return {"type": "custom_tool_call", **item, "input": text}
        case arguments:  # also wrong arguments of a custom tool: the client tells the model so
            return {"type": "function_call", **item, "arguments": json.dumps(arguments)}
