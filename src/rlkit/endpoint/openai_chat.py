"""OpenAI's chat completions, https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, override

from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, Field

from rlkit.endpoint.protocol import (
    Call,
    ContentPart,
    Exchange,
    Items,
    Stops,
    Text,
    check_image_url,
    check_parameters,
    count_tokens,
    format_event,
    make_unique_id,
    parse_arguments,
    parse_content,
    read_unique_id,
)
from rlkit.types import ImagePart, Message, Reply, Tool, ToolCall

CHOICES_MAX = 128

_IGNORED = frozenset({
    "metadata", "prompt_cache_key", "reasoning_effort", "safety_identifier", "seed", "service_tier", "store", "user",
    "verbosity",
})  # fmt: skip
"""Parameters that the policy need not follow: how much it thinks and writes is its own. Seeds are those of the run."""

_NEUTRAL: Mapping[str, Sequence[object]] = {
    "frequency_penalty": (0,),
    "function_call": ("auto",),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "top_p": (1,),
}
"""Values of further parameters that change nothing, or that `make_call` follows."""


class _Image(ContentPart):
    type: Literal["image_url"]
    url: str = Field(validation_alias=AliasPath("image_url", "url"))

    @override
    def parse(self) -> ImagePart:
        return {"type": "image", "image": check_image_url(self.url, field="messages")}


class _Call(BaseModel):
    id: str
    name: str = Field(validation_alias=AliasPath("function", "name"))
    arguments: str = Field(validation_alias=AliasPath("function", "arguments"))


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Annotated[Text | _Image, Field(discriminator="type")]] | None = None
    reasoning_content: str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "thinking"))
    tool_calls: Items[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def parse(self) -> Message:
        """Return the message in rlkit's shape."""
        role = "system" if self.role == "developer" else self.role
        message: Message = {"role": role, "content": parse_content(self.content)}
        if self.reasoning_content is not None:
            message["thinking"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": read_unique_id(call.id),
                    "name": call.name,
                    "arguments": parse_arguments(call.id, call.arguments, field="messages"),
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = read_unique_id(self.tool_call_id)
        if self.name is not None:
            message["name"] = self.name
        return message


class _Tool(BaseModel):
    type: Literal["function"]
    name: str = Field(validation_alias=AliasPath("function", "name"))
    description: str | None = Field(None, validation_alias=AliasPath("function", "description"))
    parameters: dict[str, Any] | None = Field(None, validation_alias=AliasPath("function", "parameters"))

    def parse(self) -> Tool:
        """Return the tool in rlkit's shape."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {"name": self.name, "description": self.description or "", "parameters": parameters}


class ChatCompletion(Exchange):
    """The API of chat completions."""

    path = "/v1/chat/completions"

    messages: Annotated[Items[_Message], Field(min_length=1)]
    tools: Items[_Tool] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    stop: Annotated[Stops, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = None
    stream_options: dict[str, Any] | None = None

    @override
    def make_call(self, conversations: Mapping[str, Sequence[Message]]) -> Call:
        parameters = self.model_extra or {}
        check_parameters(parameters, ignored=_IGNORED, neutral=_NEUTRAL)
        return Call(
            [message.parse() for message in self.messages],
            tools=[tool.parse() for tool in (self.tools or ()) if parameters.get("tool_choice") != "none"],
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=self.temperature,
            stop=self.stop or (),
            choices=self.n or 1,
        )

    @override
    def encode(self, replies: Sequence[Reply]) -> Mapping[str, Any]:
        choices = [
            {"index": index, "message": message, "finish_reason": _finish_reason(reply), "logprobs": None}
            for index, reply in enumerate(replies)
            for message in [_encode_message(reply)]
        ]
        return {**self._make_envelope("chat.completion"), "choices": choices, "usage": _encode_usage(replies)}

    @override
    def encode_opening(self) -> Iterator[str]:
        yield self._open_choice(0)  # a limit of the rollout may leave out the others

    @override
    def encode_events(self, replies: Sequence[Reply]) -> Iterator[str]:
        for index, reply in enumerate(replies):
            if index:
                yield self._open_choice(index)
            delta = _encode_message(reply)
            del delta["role"]  # clients join the texts of all deltas
            for number, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = number
            yield self._chunk([{"index": index, "delta": delta, "finish_reason": None}])
            yield self._chunk([{"index": index, "delta": {}, "finish_reason": _finish_reason(reply)}])
        if (self.stream_options or {}).get("include_usage"):
            yield self._chunk([], usage=_encode_usage(replies))
        yield "data: [DONE]\n\n"

    def _open_choice(self, index: int) -> str:
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "finish_reason": None}])

    def _chunk(self, choices: Sequence[object], **fields: object) -> str:
        return format_event({**self._make_envelope("chat.completion.chunk"), "choices": choices, **fields})

    def _make_envelope(self, kind: str) -> Mapping[str, Any]:
        return {"id": f"chatcmpl-{self._tag}", "created": self._created_at, "model": self.model, "object": kind}


def _encode_message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if "thinking" in reply.message:
        message["reasoning_content"] = reply.thinking
    if reply.tool_calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [encode_tool_call(call, make_unique_id(call["id"])) for call in reply.tool_calls]
    return message


def encode_tool_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    """Return a tool call in OpenAI's shape, with an id of its own."""
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"id": call_id, "type": "function", "function": function}


def _finish_reason(reply: Reply) -> str:
    return "length" if reply.truncated else "tool_calls" if reply.tool_calls else "stop"


def _encode_usage(replies: Sequence[Reply]) -> Mapping[str, int]:
    prompt, completion = count_tokens(replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
