"""OpenAI's responses, https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, override

from pydantic import BeforeValidator, Field, JsonValue, PrivateAttr

from rlkit.endpoint.openai_items import Item, OfferedTool, ToolItem, encode_reply, read_messages
from rlkit.endpoint.protocol import Call, Exchange, Items, check_parameters, count_tokens, format_event, make_unique_id
from rlkit.endpoint.rejection import Rejection
from rlkit.types import Message, Reply

_IGNORED = frozenset({
    "client_metadata", "max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "stream_options", "user",
})  # fmt: skip
"""Parameters without an effect on the distribution of the reply. `max_tool_calls` counts calls of built-in tools."""

_NEUTRAL: Mapping[str, Sequence[object]] = {
    "background": (False,),
    "include": ([],),
    "parallel_tool_calls": (True,),
    "text.format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "top_p": (1,),
    "truncation": ("disabled",),
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


def _complete_items(value: str | list[Any]) -> list[Any]:
    """Return items with their type; a text is a message of the user."""
    items = value if isinstance(value, list) else [{"role": "user", "content": value}]
    return [{**item, "type": item.get("type") or "message"} if isinstance(item, dict) else item for item in items]


class ResponseRequest(Exchange):
    """The API of responses."""

    path = "/v1/responses"

    input: Annotated[Items[Item], BeforeValidator(_complete_items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Items[ToolItem] | None = None
    tool_choice: JsonValue = None
    text: dict[str, JsonValue] | None = None
    include: Items[str] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    store: bool | None = None

    _id: str = PrivateAttr(default_factory=lambda: make_unique_id("resp"))
    _event_count: int = 0

    @cached_property
    def _offered_tools(self) -> Mapping[str, OfferedTool]:
        tools = dict[str, OfferedTool]()
        for offered in (offered for tool in self.tools or () for offered in tool.offer()):
            if tools.setdefault(offered.tool["name"], offered) is not offered:
                raise Rejection(400, f"two tools have the name {offered.tool['name']!r}", field="tools")
        return tools

    @override
    def make_call(self, conversations: Mapping[str, Sequence[Message]]) -> Call:
        parameters = {
            **(self.model_extra or {}),
            "include": [name for name in self.include or () if name == _LOGPROBS],
            "text.format": (self.text or {}).get("format"),
            "tool_choice": self.tool_choice,
        }
        check_parameters(parameters, ignored=_IGNORED, neutral=_NEUTRAL)
        earlier = () if self.previous_response_id is None else conversations.get(self.previous_response_id)
        if earlier is None:
            raise Rejection(404, f"there is no response {self.previous_response_id!r}", code="not_found")
        return Call(
            [*earlier, *read_messages(self.input)],
            tools=[offered.tool for offered in self._offered_tools.values() if self.tool_choice != "none"],
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            instructions=[{"role": "system", "content": self.instructions}] if self.instructions else (),
            response_id=None if self.store is False else self._id,
        )

    @override
    def encode(self, replies: Sequence[Reply]) -> Mapping[str, Any]:
        (reply,) = replies
        items = encode_reply(
            reply,
            tag=self._tag,
            tools=self._offered_tools,
            with_opaque_reasoning=_OPAQUE_REASONING in (self.include or ()),
        )
        prompt, completion = count_tokens(replies)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }
        truncation = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return {
            **self._make_response("completed"),
            "output": items,
            "usage": usage,
            **(truncation if reply.truncated else {}),
        }

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
        error = rejection.encode()["error"]
        # The SDK raises `error`, and Codex waits for the failed response.
        yield self._event("error", code=rejection.code, message=str(rejection), param=rejection.field, error=error)
        code = rejection.code or ("server_error" if rejection.status >= 500 else "invalid_prompt")
        failure = {"error": {"code": code, "message": str(rejection)}}
        yield self._event("response.failed", response={**self._make_response("failed"), **failure})

    def _encode_item_events(self, index: int, item: Mapping[str, Any]) -> Iterator[str]:
        kind, field = _STREAMED_FIELDS[item["type"]]
        position: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
        parts: list[dict[str, Any]] | None = item.get("content")
        empty: dict[str, Any] = {field: ""} if parts is None else {"content": []}
        opening = {**item, **empty, "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=opening)
        details: dict[str, Any] = {"name": item["name"]} if item["type"] == "function_call" else {}
        if parts is not None:
            position["content_index"] = 0
            details = {"logprobs": []} if item["type"] == "message" else {}
            yield self._event("response.content_part.added", **position, part={**parts[0], field: ""})
        text = item[field] if parts is None else parts[0][field]
        yield self._event(f"response.{kind}.delta", **position, **details, delta=text)
        yield self._event(f"response.{kind}.done", **position, **details, **{field: text})
        if parts is not None:
            yield self._event("response.content_part.done", **position, part=parts[0])
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _make_response(self, status: str) -> Mapping[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "model": self.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "metadata": (self.model_extra or {}).get("metadata"),
            "parallel_tool_calls": True,
            "tool_choice": self.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_unset=True) for tool in self.tools or ()],
            "usage": None,
        }

    def _event(self, kind: str, /, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": self._event_count, **fields}
        self._event_count += 1
        return format_event(data, name=kind)
