"""Anthropic's messages, https://platform.claude.com/docs/en/api/messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, override

from pydantic import AliasPath, BaseModel, Field

from rlkit.endpoint.protocol import (
    Call,
    ContentPart,
    Exchange,
    Items,
    Stops,
    Text,
    check_parameters,
    count_tokens,
    format_event,
    make_unique_id,
    parse_content,
    read_unique_id,
)
from rlkit.endpoint.rejection import Rejection
from rlkit.types import ImagePart, Message, Reply, Tool, ToolCall

_IGNORED = frozenset({
    "billing_policy", "cache_control", "context_management", "diagnostics", "inference_geo", "metadata",
    "output_config.effort", "service_tier", "speed", "thinking", "user_profile_id", "workspace_id",
})  # fmt: skip
"""Parameters that the policy need not follow: how much it thinks is its own, and its context is never edited."""

_NEUTRAL: Mapping[str, Sequence[object]] = {
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}, {"type": "none"}),
    "top_p": (1,),
}
"""Values of further parameters that change nothing, or that `make_call` follows."""

_SIGNATURE = "cmxraXQ="  # signature of all thinking, which clients send back with it; nothing reads it
_BILLING = "x-anthropic-billing-header:"
"""Start of a system block of Claude Code that its vendor takes out: a text for the model has no such block."""


class _Image(ContentPart):
    type: Literal["image"]
    source_type: Literal["base64"] = Field(validation_alias=AliasPath("source", "type"))
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] = Field(
        validation_alias=AliasPath("source", "media_type")
    )
    data: str = Field(validation_alias=AliasPath("source", "data"))

    @override
    def parse(self) -> ImagePart:
        return {"type": "image", "image": f"data:{self.media_type};base64,{self.data}"}


class _Thinking(BaseModel):
    """Thinking; that of other models may be encrypted, and is left out."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class _ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    def parse(self) -> ToolCall:
        """Return the block in rlkit's shape."""
        return {"id": read_unique_id(self.id), "name": self.name, "arguments": self.input}


class _ToolResult(BaseModel):
    """The result of a tool; whether it is an error is for its text to say, as in other APIs."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[Annotated[Text | _Image, Field(discriminator="type")]] = ""

    def parse(self) -> Message:
        """Return the block in rlkit's shape."""
        call_id = read_unique_id(self.tool_use_id)
        return {"role": "tool", "content": parse_content(self.content), "tool_call_id": call_id}


type _Block = Annotated[Text | _Image | _Thinking | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str | Items[_Block]

    def parse(self) -> list[Message]:
        """Return the results of tools as messages, and other blocks as a message: the reply, if they are one."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [block.parse() for block in self.content if isinstance(block, _ToolResult)]
        if results and len(results) == len(self.content):
            return results
        parts = [block for block in self.content if isinstance(block, ContentPart)]
        message: Message = {"role": self.role, "content": parse_content(parts)}
        if thoughts := [block.thinking for block in self.content if block.type == "thinking"]:
            message["thinking"] = "".join(thoughts)
        if calls := [block.parse() for block in self.content if isinstance(block, _ToolUse)]:
            message["tool_calls"] = calls
        return [*results, message]


class _Tool(BaseModel):
    type: Literal["custom"] | None = None
    name: str
    description: str = ""
    input_schema: dict[str, Any]

    def parse(self) -> Tool:
        """Return the tool in rlkit's shape."""
        return {"name": self.name, "description": self.description, "parameters": self.input_schema}


class AnthropicMessage(Exchange):
    """The API of messages, as Claude Code and Anthropic's clients use it."""

    path = "/v1/messages"
    keep_alive = format_event({"type": "ping"}, name="ping")

    system: str | Items[Text] = ""
    messages: Annotated[Items[_Message], Field(min_length=1)]
    tools: Items[_Tool] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Stops | None = None
    output_config: dict[str, Any] | None = None

    @override
    def make_call(self, conversations: Mapping[str, Sequence[Message]]) -> Call:
        parameters = self.model_extra or {}
        output = {f"output_config.{name}": value for name, value in (self.output_config or {}).items()}
        check_parameters({**parameters, **output}, ignored=_IGNORED, neutral=_NEUTRAL)
        if self.messages[-1].role == "assistant":
            raise Rejection(400, "messages: prefilled replies are not supported: end with a user message")
        blocks = [self.system] if isinstance(self.system, str) else [block.text for block in self.system]
        system = "".join(text for text in blocks if not text.startswith(_BILLING))
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        return Call(
            [*messages, *(part for message in self.messages for part in message.parse())],
            tools=[tool.parse() for tool in (self.tools or ()) if parameters.get("tool_choice") != {"type": "none"}],
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            stop=self.stop_sequences or (),
        )

    @override
    def encode(self, replies: Sequence[Reply]) -> Mapping[str, Any]:
        (reply,) = replies
        prompt, completion = count_tokens(replies)
        return {
            "id": f"msg_{self._tag}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": _encode_blocks(reply),
            "stop_reason": _find_stop_reason(reply),
            "stop_sequence": reply.stop_text,
            "usage": {"input_tokens": prompt, "output_tokens": completion},
        }

    @override
    def encode_opening(self) -> Iterator[str]:
        yield self.keep_alive  # `message_start` has the length of the prompt, which is not known yet

    @override
    def encode_events(self, replies: Sequence[Reply]) -> Iterator[str]:
        message = self.encode(replies)
        usage = message["usage"]
        opening: Mapping[str, object] = {"content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
        yield _format_event("message_start", message={**message, **opening})
        for index, block in enumerate(message["content"]):
            start, deltas = _split_block(block)
            yield _format_event("content_block_start", index=index, content_block=start)
            for delta in deltas:
                yield _format_event("content_block_delta", index=index, delta=delta)
            yield _format_event("content_block_stop", index=index)
        ending = {key: message[key] for key in ("stop_reason", "stop_sequence")}
        yield _format_event("message_delta", delta=ending, usage=usage)
        yield _format_event("message_stop")


def _format_event(name: str, **data: object) -> str:
    return format_event({"type": name, **data}, name=name)


def _find_stop_reason(reply: Reply) -> str:
    if reply.truncated:
        return "max_tokens"
    if reply.stop_text is not None:
        return "stop_sequence"
    return "tool_use" if reply.tool_calls else "end_turn"


def _encode_blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks = list[dict[str, Any]]()
    if "thinking" in reply.message:
        blocks.append({"type": "thinking", "thinking": reply.thinking, "signature": _SIGNATURE})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.tool_calls:
        call_id = make_unique_id(call["id"])
        blocks.append({"type": "tool_use", "id": call_id, "name": call["name"], "input": call["arguments"]})
    return blocks


def _split_block(block: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Mapping[str, str]]]:
    """Return a block of a stream as its start and the changes that complete it."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    fields = [key for key in block if key != "type"]
    return {**block, **dict.fromkeys(fields, "")}, [{"type": f"{key}_delta", key: block[key]} for key in fields]
