"""OpenAI's chat completions, https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, override

from pydantic import BaseModel, ConfigDict, Field

from rlkit.endpoint.protocol import (
    MODEL,
    Call,
    Exchange,
    Protocol,
    check_image_url,
    check_parameters,
    count_tokens,
    format_event,
    join_texts,
    make_unique_id,
    parse_arguments,
    read_unique_id,
)
from rlkit.endpoint.rejection import Rejection, parse_body
from rlkit.types import ImagePart, Json, Message, Reply, TextPart, Tool

CHOICES_MAX = 128

_IGNORED = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "seed", "service_tier", "store", "user"})
"""Parameters without an effect on the distribution of the reply. Seeds are those of the run."""

_NEUTRAL: Mapping[str, Sequence[object]] = {
    "frequency_penalty": (0, None),
    "function_call": ("auto", None),
    "logit_bias": ({}, None),
    "logprobs": (False, None),
    "modalities": (["text"], None),
    "parallel_tool_calls": (True, None),
    "presence_penalty": (0, None),
    "response_format": ({"type": "text"}, None),
    "tool_choice": ("auto", None),
    "top_logprobs": (None,),
    "top_p": (1, None),
}
"""Values of further parameters that change nothing."""


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str

    def parse(self) -> TextPart:
        return {"type": "text", "text": self.text}


class _ImageUrl(BaseModel):
    url: str


class _ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: _ImageUrl

    def parse(self) -> ImagePart:
        return {"type": "image", "image": check_image_url(self.image_url.url, field="messages")}


class _CalledFunction(BaseModel):
    name: str
    arguments: str


class _Call(BaseModel):
    id: str
    function: _CalledFunction


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[_TextPart | _ImagePart, Field(discriminator="type")]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def parse(self) -> Message:
        """Return the message in rlkit's shape."""
        message: Message = {"role": "system" if self.role == "developer" else self.role, "content": self._content()}
        if self.reasoning_content is not None:
            message["thinking"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": read_unique_id(call.id),
                    "name": call.function.name,
                    "arguments": parse_arguments(call.id, call.function.arguments, field="messages"),
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = read_unique_id(self.tool_call_id)
        if self.name is not None:
            message["name"] = self.name
        return message

    def _content(self) -> str | list[TextPart | ImagePart]:
        if not isinstance(self.content, list):
            return self.content or ""
        return join_texts([part.parse() for part in self.content])


class _Function(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Function

    def parse(self) -> Tool:
        """Return the tool in rlkit's shape."""
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"name": self.function.name, "description": self.function.description or "", "parameters": parameters}


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str = MODEL
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class OpenAIChat(Protocol):
    """The API of chat completions."""

    path = "/v1/chat/completions"

    @override
    def parse(self, body: bytes) -> Exchange:
        return _ChatExchange(parse_body(body, _Body))

    @override
    def encode_error(self, rejection: Rejection) -> Mapping[str, Json]:
        return encode_openai_error(rejection)


def encode_openai_error(rejection: Rejection) -> Mapping[str, Json]:
    """Return an error in the shape of OpenAI's APIs."""
    message, kind = str(rejection), "server_error" if rejection.status >= 500 else "invalid_request_error"
    if rejection.code == "context_length_exceeded":  # clients look for OpenAI's words
        message = f"This model's maximum context length is exceeded: {message}"
    return {"error": {"message": message, "type": kind, "param": rejection.field, "code": rejection.code}}


class _ChatExchange(Exchange):
    def __init__(self, body: _Body) -> None:
        self._body = body
        self.model = body.model
        self.is_stream = bool(body.stream)
        self._envelope = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}

    @override
    def make_call(self, earlier: Sequence[Message]) -> Call:
        body = self._body
        check_parameters(body.model_extra, ignored=_IGNORED, neutral=_NEUTRAL)
        return Call(
            [message.parse() for message in body.messages],
            tools=[tool.parse() for tool in body.tools or ()],
            max_tokens=body.max_completion_tokens or body.max_tokens,
            temperature=body.temperature,
            stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
            choices=body.n or 1,
        )

    @override
    def encode(self, replies: Sequence[Reply]) -> Mapping[str, Any]:
        choices = [
            {"index": index, "message": message, "finish_reason": _finish_reason(reply), "logprobs": None}
            for index, reply in enumerate(replies)
            for message in [_encode_message(reply)]
        ]
        return {**self._envelope, "object": "chat.completion", "choices": choices, "usage": _encode_usage(replies)}

    @override
    def encode_opening(self) -> Iterator[str]:
        for index in range(self._body.n or 1):
            yield self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    @override
    def encode_events(self, replies: Sequence[Reply]) -> Iterator[str]:
        for index, reply in enumerate(replies):
            delta = _encode_message(reply)
            del delta["role"]  # clients join the texts of all deltas
            for number, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = number
            yield self._chunk([{"index": index, "delta": delta, "finish_reason": None}])
            yield self._chunk([{"index": index, "delta": {}, "finish_reason": _finish_reason(reply)}])
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield self._chunk([], usage=_encode_usage(replies))
        yield "data: [DONE]\n\n"

    @override
    def encode_error_events(self, rejection: Rejection) -> Iterator[str]:
        yield format_event(encode_openai_error(rejection))

    def _chunk(self, choices: Sequence[object], **more: object) -> str:
        return format_event({**self._envelope, "object": "chat.completion.chunk", "choices": choices, **more})


def _encode_message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if "thinking" in reply.message:
        message["reasoning_content"] = reply.thinking
    if reply.tool_calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [
            {
                "id": make_unique_id(call["id"]),
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for call in reply.tool_calls
        ]
    return message


def _finish_reason(reply: Reply) -> str:
    return "length" if reply.truncated else "tool_calls" if reply.tool_calls else "stop"


def _encode_usage(replies: Sequence[Reply]) -> Mapping[str, int]:
    prompt, completion = count_tokens(replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
