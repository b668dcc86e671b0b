"""OpenAI's responses, https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, override

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from rlkit.endpoint.openai_chat import encode_openai_error
from rlkit.endpoint.openai_items import Item, ToolItem, encode_reply, read_messages
from rlkit.endpoint.protocol import (
    MODEL,
    Call,
    Exchange,
    Protocol,
    check_parameters,
    count_tokens,
    format_event,
    make_tag,
    make_unique_id,
)
from rlkit.endpoint.rejection import Rejection, parse_body
from rlkit.types import Json, Message, Reply

_IGNORED = frozenset({
    "client_metadata", "max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "stream_options", "user",
})  # fmt: skip
"""Parameters without an effect on the distribution of the reply. `max_tool_calls` counts calls of built-in tools."""

_NEUTRAL: Mapping[str, Sequence[object]] = {
    "background": (False, None),
    "context_management": (None,),
    "conversation": (None,),
    "include": ([],),
    "moderation": (None,),
    "parallel_tool_calls": (True, None),
    "prompt": (None,),
    "text.format": ({"type": "text"}, None),
    "tool_choice": ("auto", "none", None),
    "top_logprobs": (0, None),
    "top_p": (1, None),
    "truncation": ("disabled", None),
}
"""Values of further parameters that change nothing."""

_LOGPROBS = "message.output_text.logprobs"
_OPAQUE_REASONING = "reasoning.encrypted_content"

_STREAMED_FIELDS = {
    "reasoning": ("reasoning_text", "text"),
    "message": ("output_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""For each type of an item the events that stream its text, and the field of the text."""


class _TextOptions(BaseModel):
    format: JsonValue = None


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str = MODEL
    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[ToolItem] | None = None
    tool_choice: JsonValue = None
    text: _TextOptions | None = None
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    store: bool | None = None
    stream: bool | None = None


class OpenAIResponses(Protocol):
    """The API of responses."""

    path = "/v1/responses"

    @override
    def parse(self, body: bytes) -> Exchange:
        return _ResponseExchange(parse_body(body, _Body))

    @override
    def encode_error(self, rejection: Rejection) -> Mapping[str, Json]:
        return encode_openai_error(rejection)


class _ResponseExchange(Exchange):
    def __init__(self, body: _Body) -> None:
        self._body = body
        self._tag = make_tag()
        self._id = make_unique_id("resp", self._tag)
        self._created_at = int(time.time())
        self._event_count = 0
        self._tools = {offered.tool["name"]: offered for tool in body.tools or () for offered in tool.offer()}
        self.model = body.model
        self.is_stream = bool(body.stream)
        self.previous_id = body.previous_response_id
        self.response_id = None if body.store is False else self._id

    @override
    def make_call(self, earlier: Sequence[Message]) -> Call:
        body = self._body
        parameters = {
            **(body.model_extra or {}),
            "include": [name for name in body.include or () if name == _LOGPROBS],
            "text.format": body.text and body.text.format,
            "tool_choice": body.tool_choice,
        }
        check_parameters(parameters, ignored=_IGNORED, neutral=_NEUTRAL)
        question = body.input
        messages = [_as_user(question)] if isinstance(question, str) else read_messages(question)
        return Call(
            [*earlier, *messages],
            tools=[] if body.tool_choice == "none" else [offered.tool for offered in self._tools.values()],
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            instructions=[{"role": "system", "content": body.instructions}] if body.instructions else (),
        )

    @override
    def encode(self, replies: Sequence[Reply]) -> Mapping[str, Any]:
        (reply,) = replies
        items = encode_reply(
            reply,
            tag=self._tag,
            tools=self._tools,
            with_opaque_reasoning=_OPAQUE_REASONING in (self._body.include or ()),
        )
        prompt, completion = count_tokens(replies)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }
        cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return {**self._make_response("completed"), "output": items, "usage": usage, **(cut if reply.truncated else {})}

    @override
    def encode_opening(self) -> Iterator[str]:
        yield self._event("response.created", response=self._make_response("in_progress"))
        yield self._event("response.in_progress", response=self._make_response("in_progress"))

    @override
    def encode_events(self, replies: Sequence[Reply]) -> Iterator[str]:
        response = self.encode(replies)
        for index, item in enumerate(response["output"]):
            yield from self._encode_item_events(index, item)
        yield self._event(f"response.{response['status']}", response=response)

    @override
    def encode_error_events(self, rejection: Rejection) -> Iterator[str]:
        error = encode_openai_error(rejection)["error"]
        # The SDK raises `error`, and Codex waits for the failed response.
        yield self._event("error", code=rejection.code, message=str(rejection), param=rejection.field, error=error)
        code = rejection.code or ("server_error" if rejection.status >= 500 else "invalid_prompt")
        failure = {"error": {"code": code, "message": str(rejection)}}
        yield self._event("response.failed", response={**self._make_response("failed"), **failure})

    def _encode_item_events(self, index: int, item: Mapping[str, Any]) -> Iterator[str]:
        kind, field = _STREAMED_FIELDS[item["type"]]
        place: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
        parts: list[dict[str, Any]] | None = item.get("content")
        empty: dict[str, Any] = {field: ""} if parts is None else {"content": []}
        opening = {**item, **empty, "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=opening)
        more: dict[str, Any] = {"name": item["name"]} if item["type"] == "function_call" else {}
        if parts is not None:
            place["content_index"] = 0
            more = {"logprobs": []} if item["type"] == "message" else {}
            yield self._event("response.content_part.added", **place, part={**parts[0], field: ""})
        text = item[field] if parts is None else parts[0][field]
        yield self._event(f"response.{kind}.delta", **place, **more, delta=text)
        yield self._event(f"response.{kind}.done", **place, **more, **{field: text})
        if parts is not None:
            yield self._event("response.content_part.done", **place, part=parts[0])
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _make_response(self, status: str) -> Mapping[str, Any]:
        body, more = self._body, self._body.model_extra or {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "model": body.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": more.get("metadata"),
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "reasoning": more.get("reasoning"),
            "temperature": body.temperature,
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "usage": None,
        }

    def _event(self, kind: str, /, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": self._event_count, **fields}
        self._event_count += 1
        return format_event(data, name=kind)


def _as_user(text: str) -> Message:
    return {"role": "user", "content": text}
