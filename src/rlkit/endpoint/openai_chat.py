"""OpenAI's chat completions, https://platform.openai.com/docs/api-reference/chat.

Invariant: a message of the client that equals a reply of the policy on the wire equals it as a message, so that the
conversation extends its exact tokens. A parameter that would change the reply in a way that the policy cannot is an
error.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rlkit.endpoint.openai_errors import Rejection, explain
from rlkit.endpoint.session import ChatReply, Session
from rlkit.errors import RlkitError
from rlkit.types import ImagePart, Json, Message, TextPart, Tool, ToolCall

MODEL = "policy"
"""Name of the model; requests may name any."""

KEEP_ALIVE_S = 10.0
"""Time between two signs of life of a stream that waits for its reply."""

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
    "stop": ([], None),
    "tool_choice": ("auto", None),
    "top_logprobs": (None,),
    "top_p": (1, None),
}
"""Values of further parameters that change nothing."""


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


class _ImageUrl(BaseModel):
    url: str


class _ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: _ImageUrl


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
        if self.reasoning_content:
            message["thinking"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [_parse_call(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message

    def _content(self) -> str | list[TextPart | ImagePart]:
        if not isinstance(self.content, list):
            return self.content or ""
        texts = [part.text for part in self.content if isinstance(part, _TextPart)]
        if len(texts) == len(self.content):
            return "".join(texts)
        return [_parse_part(part) for part in self.content]


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
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def check_parameters(self) -> None:
        """Raise a Rejection for a parameter that the policy cannot follow."""
        for name, value in (self.model_extra or {}).items():
            if name in _IGNORED or value in _NEUTRAL.get(name, ()):
                continue
            if name in _NEUTRAL:
                reason = f"{name}={json.dumps(value)[:100]} is not supported: leave it out"
                raise Rejection(400, reason, code="unsupported_value", field=name)
            raise Rejection(400, f"unknown parameter: {name}", code="unknown_parameter", field=name)


async def respond(session: Session, body: bytes, request: Request) -> Response:
    """Return the response to a request.

    Raises:
        Rejection: the request is malformed, or has no reply.
    """
    parsed = _parse_body(body)
    parsed.check_parameters()
    replies = asyncio.ensure_future(_chat(session, parsed))
    envelope: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": parsed.model,
    }
    if parsed.stream:
        has_usage = parsed.stream_options is not None and parsed.stream_options.include_usage
        return StreamingResponse(_stream(replies, envelope, has_usage=has_usage), media_type="text/event-stream")
    gone = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait([replies, gone], return_when=asyncio.FIRST_COMPLETED)
        if not replies.done():
            raise Rejection(400, "the client is gone")
        choices = [
            {
                "index": index,
                "message": _encode_message(reply),
                "finish_reason": _finish_reason(reply),
                "logprobs": None,
            }
            for index, reply in enumerate(replies.result())
        ]
        usage = _count_usage(replies.result())
        return JSONResponse({**envelope, "object": "chat.completion", "choices": choices, "usage": usage})
    finally:
        gone.cancel()
        replies.cancel()


def _parse_body(body: bytes) -> _Body:
    try:
        return _Body.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise Rejection(400, f"{field}: {first['msg']}" if field else first["msg"], field=field or None) from None


async def _chat(session: Session, body: _Body) -> Sequence[ChatReply]:
    messages = [message.parse() for message in body.messages]
    tools = [tool.parse() for tool in body.tools or ()]
    max_tokens = body.max_completion_tokens or body.max_tokens
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(session.chat(messages, tools, max_tokens=max_tokens, temperature=body.temperature))
                for _ in range(body.n or 1)
            ]
    except BaseExceptionGroup as errors:
        error = errors.exceptions[0]
        raise (explain(error) if isinstance(error, RlkitError | ValueError) else error) from error
    return [task.result() for task in tasks]


async def _stream(
    replies: asyncio.Future[Sequence[ChatReply]], envelope: Mapping[str, Any], *, has_usage: bool
) -> AsyncGenerator[str]:
    """Yield server-sent events: a reply comes as one delta, because services return whole completions."""

    def event(choices: Sequence[object], **more: object) -> str:
        return f"data: {json.dumps({**envelope, 'object': 'chat.completion.chunk', 'choices': choices, **more})}\n\n"

    try:
        while not (await asyncio.wait([replies], timeout=KEEP_ALIVE_S))[0]:
            yield ": waiting for the reply\n\n"
        try:
            choices = replies.result()
        except Rejection as rejection:
            yield f"data: {json.dumps(rejection.body)}\n\n"
            return
        for index, reply in enumerate(choices):
            delta = _encode_message(reply)
            for number, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = number
            yield event([{"index": index, "delta": delta, "finish_reason": None}])
            yield event([{"index": index, "delta": {}, "finish_reason": _finish_reason(reply)}])
        if has_usage:
            yield event([], usage=_count_usage(choices))
        yield "data: [DONE]\n\n"
    finally:
        replies.cancel()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _parse_part(part: _TextPart | _ImagePart) -> TextPart | ImagePart:
    if isinstance(part, _TextPart):
        return {"type": "text", "text": part.text}
    if not part.image_url.url.startswith("data:"):  # otherwise the run would open its own files and addresses
        raise Rejection(400, "images must be data URLs (data:image/png;base64,…)", field="messages")
    return {"type": "image", "image": part.image_url.url}


def _parse_call(call: _Call) -> ToolCall:
    try:
        arguments: Json = json.loads(call.function.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise Rejection(400, f"the arguments of the tool call {call.id!r} are not a JSON object", field="messages")
    return {"id": call.id, "name": call.function.name, "arguments": arguments}


def _encode_message(reply: ChatReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.tool_calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for call in reply.tool_calls
        ]
    return message


def _finish_reason(reply: ChatReply) -> str:
    return "length" if reply.truncated else "tool_calls" if reply.tool_calls else "stop"


def _count_usage(replies: Sequence[ChatReply]) -> Mapping[str, int]:
    completion = sum(len(reply.turn.completion) for reply in replies)
    prompt = len(replies[0].tokens) - len(replies[0].turn.completion)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
