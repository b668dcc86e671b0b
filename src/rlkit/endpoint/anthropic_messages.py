"""Anthropic's messages, https://platform.claude.com/docs/en/api/messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, override

from pydantic import BaseModel, ConfigDict, Field

from rlkit.endpoint.protocol import (
    MODEL,
    Call,
    Exchange,
    Protocol,
    check_parameters,
    count_tokens,
    format_event,
    join_texts,
    make_unique_id,
    read_unique_id,
)
from rlkit.endpoint.rejection import Rejection, parse_body
from rlkit.types import ImagePart, Json, Message, Reply, TextPart, Tool, ToolCall

_IGNORED = frozenset({
    "billing_policy", "cache_control", "context_management", "diagnostics", "inference_geo", "metadata",
    "output_config.effort", "service_tier", "speed", "thinking", "user_profile_id", "workspace_id",
})  # fmt: skip
"""Parameters that the policy need not follow: how much it thinks is its own, and its context is never edited."""

_NEUTRAL: Mapping[str, Sequence[object]] = {
    "output_config.format": (None,),
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}, {"type": "none"}),
    "top_k": (None,),
    "top_p": (1, None),
}
"""Values of further parameters that change nothing, or that `make_call` follows."""

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}

_SIGNATURE = "cmxraXQ="
"""Signature of all thinking, which clients send back with it; nothing reads it."""

_BILLING = "x-anthropic-billing-header:"
"""Start of a system block of Claude Code that its vendor takes out: a text for the model has no such block."""


class _Text(BaseModel):
    type: Literal["text"]
    text: str

    def parse(self) -> TextPart:
        """Return the block in rlkit's shape."""
        return {"type": "text", "text": self.text}


class _ImageSource(BaseModel):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class _Image(BaseModel):
    type: Literal["image"]
    source: _ImageSource

    def parse(self) -> ImagePart:
        """Return the block in rlkit's shape."""
        return {"type": "image", "image": f"data:{self.source.media_type};base64,{self.source.data}"}


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
    content: str | list[Annotated[_Text | _Image, Field(discriminator="type")]] = ""

    def parse(self) -> Message:
        """Return the block in rlkit's shape."""
        content = self.content if isinstance(self.content, str) else join_texts([part.parse() for part in self.content])
        return {"role": "tool", "content": content, "tool_call_id": read_unique_id(self.tool_use_id)}


type _Block = Annotated[_Text | _Image | _Thinking | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str | list[_Block]

    def parse(self) -> list[Message]:
        """Return the results of tools as messages, and other blocks as a message: the reply, if they are one."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [block.parse() for block in self.content if isinstance(block, _ToolResult)]
        if results and len(results) == len(self.content):
            return results
        parts = [block.parse() for block in self.content if isinstance(block, _Text | _Image)]
        message: Message = {"role": self.role, "content": join_texts(parts)}
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


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str = MODEL
    system: str | list[_Text] = ""
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] = []
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = []
    output_config: dict[str, Any] = {}
    stream: bool = False

    def parse_system(self) -> list[Message]:
        """Return the system prompt as a message, if it has text."""
        texts = [self.system] if isinstance(self.system, str) else [block.text for block in self.system]
        text = "".join(text for text in texts if not text.startswith(_BILLING))
        return [{"role": "system", "content": text}] if text else []


class AnthropicMessages(Protocol):
    """The API of messages, as Claude Code and Anthropic's clients use it."""

    path = "/v1/messages"

    @override
    def parse(self, body: bytes) -> Exchange:
        return _MessagesExchange(parse_body(body, _Body))

    @override
    def encode_error(self, rejection: Rejection) -> Mapping[str, Json]:
        return _encode_error(rejection)


def _encode_error(rejection: Rejection) -> Mapping[str, Json]:
    default = "api_error" if rejection.status >= 500 else "invalid_request_error"
    is_long = rejection.code == "context_length_exceeded"  # clients look for Anthropic's words
    message = f"prompt is too long: {rejection}" if is_long else str(rejection)
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(rejection.status, default), "message": message}}


class _MessagesExchange(Exchange):
    keep_alive = format_event({"type": "ping"}, name="ping")

    def __init__(self, body: _Body) -> None:
        self._body = body
        self.model = body.model
        self.is_stream = body.stream

    @override
    def make_call(self, earlier: Sequence[Message]) -> Call:
        body, parameters = self._body, self._body.model_extra or {}
        output = {f"output_config.{name}": value for name, value in body.output_config.items()}
        check_parameters({**parameters, **output}, ignored=_IGNORED, neutral=_NEUTRAL)
        if body.messages[-1].role == "assistant":
            raise Rejection(400, "messages: prefilled replies are not supported: end with a user message")
        return Call(
            [*body.parse_system(), *(part for message in body.messages for part in message.parse())],
            tools=() if parameters.get("tool_choice") == {"type": "none"} else [tool.parse() for tool in body.tools],
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            stop=body.stop_sequences,
        )

    @override
    def encode(self, replies: Sequence[Reply]) -> Mapping[str, Any]:
        (reply,) = replies
        prompt, completion = count_tokens(replies)
        return {
            "id": f"msg_{uuid.uuid4().hex}",
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

    @override
    def encode_error_events(self, rejection: Rejection) -> Iterator[str]:
        yield format_event(_encode_error(rejection), name="error")


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
