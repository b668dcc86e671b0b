"""Policy that uses an OpenAI-compatible endpoint, for evaluation only.

Invariant: its replies are never trained on. Endpoints return no token ids, so turns have placeholder tokens, as many as
the endpoint reports.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast, override

import numpy as np
from pydantic import HttpUrl, TypeAdapter, ValidationError

from rlkit._util.threads import in_thread
from rlkit.endpoint.openai_chat import encode_tool_call
from rlkit.endpoint.protocol import parse_arguments
from rlkit.endpoint.rejection import Rejection
from rlkit.errors import ContextFull, EnvironmentFault, LimitReached, ServiceError, UsageError
from rlkit.policy import ChatRequest, Limits, Policy, SampleRequest
from rlkit.types import Message, Reply, Sampling, ToolCall, Turn, as_prompt

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_FIRST_WAIT_S = 1.0
_MAX_WAIT_S = 60.0
_RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_MAX_MESSAGE_CHARS = 300

_MAX_TOKENS = 1 << 24  # limit of the token count that an endpoint reports, because a turn holds an array of that length


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a model at an endpoint.

    Raises:
        UsageError: the URL is not an HTTP address, or the key contains characters that HTTP headers cannot contain.
    """

    url: str  # address that ends with `/v1`
    model: str  # name of the model at the endpoint
    key: str | None = field(default=None, repr=False)  # API key, if the endpoint needs one
    key_env: str = "OPENAI_API_KEY"  # environment variable that holds the key, for messages

    def __post_init__(self) -> None:
        try:
            TypeAdapter(HttpUrl).validate_python(self.url)
        except ValidationError:
            raise UsageError(f"the endpoint {self.url!r} is not an address of the form https://HOST/v1") from None
        if self.key and not (self.key.isascii() and self.key.isprintable()):
            problem = "the key has a line break or a character outside of ASCII; copy it again"
            raise UsageError(f"{self.key_env}: {problem}")


class EndpointPolicy(Policy):
    """Policy of one episode that sends requests to an endpoint.

    Args:
        timeout_s: limit in seconds of each attempt, and of the time in which a retry may begin.
    """

    before_retry: Callable[[], Awaitable[None]] | None = None
    """Awaited before each attempt of a request, except for the first."""

    def __init__(
        self, client: AsyncOpenAI, *, endpoint: Endpoint, sampling: Sampling, limits: Limits, timeout_s: float
    ) -> None:
        super().__init__(sampling=sampling, limits=limits)
        self._client = client
        self._endpoint = endpoint
        self._timeout_s = timeout_s

    @override
    async def _respond(self, request: SampleRequest | ChatRequest) -> Reply:
        body, forced = dict[str, Any](), None
        if isinstance(request, ChatRequest):
            if len(request.forced):
                raise EnvironmentFault("an endpoint cannot force the start of a reply")
            body["messages"] = [_encode_message(message) for message in request.messages]
            if request.tools:
                body["tools"] = [{"type": "function", "function": dict(tool)} for tool in request.tools]
        else:
            forced = request.forced if len(request.forced) else ""  # the default is an empty array
            if not isinstance(request.prompt, str) or not isinstance(forced, str):
                raise EnvironmentFault("an endpoint does not accept tokens: use texts")
            body["prompt"] = request.prompt + forced
        if request.stop:
            body["stop"] = [request.stop] if isinstance(request.stop, str) else list(request.stop)
        clock = asyncio.get_running_loop().time
        started = clock()
        reply = await self._request(self._make_settings(request) | body, forced)
        turn = replace(reply.turn, seconds=clock() - started, role=request.role)
        self._turns.append(turn)
        return replace(reply, turn=turn)

    def _make_settings(self, request: SampleRequest | ChatRequest) -> dict[str, Any]:
        if (max_turns := self._limits.max_turns) is not None and len(self._turns) >= max_turns:
            raise LimitReached(f"the rollout has had its {max_turns} turns (max_turns)")
        sampling = self._sampling
        return {
            "model": self._endpoint.model,
            "max_tokens": min(request.max_tokens or sampling.max_tokens, sampling.max_tokens),
            "temperature": sampling.temperature if request.temperature is None else request.temperature,
            "top_p": sampling.top_p,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
        }

    async def _request(self, body: Mapping[str, Any], forced: str | None) -> Reply:
        """Send a request, with retries that begin within `timeout_s`; `forced` is None for a chat."""
        import httpx
        import openai

        clock = asyncio.get_running_loop().time
        deadline_s, wait_s = clock() + self._timeout_s, _FIRST_WAIT_S
        path = "/chat/completions" if forced is None else "/completions"
        options: openai.RequestOptions = {"headers": {} if self._endpoint.key else {"Authorization": openai.omit}}
        while True:
            request_id = None
            try:
                async with asyncio.timeout(self._timeout_s):  # the client's limit applies to each chunk of a response
                    response = await self._client.post(path, cast_to=httpx.Response, body=body, options=options)
                return read_reply(response.content, forced)
            except TimeoutError:
                problem = f"no complete response within {self._timeout_s:g} s"
            except _MalformedResponse as error:
                problem = str(error)
            except openai.APIConnectionError as error:
                problem = f"{type(error.__cause__).__name__}: {error.__cause__}"
            except openai.APIStatusError as error:
                problem, request_id = f"{error.status_code}: {_truncate(error.response.text)}", error.request_id
                if error.status_code not in _RETRIED_STATUSES:
                    raise _make_rejection_error(error.status_code, problem, request_id) from error
            if clock() + wait_s > deadline_s:
                message = f"the endpoint {self._client.base_url} does not answer: {problem}"
                raise ServiceError(message, request_id=request_id)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)
            if self.before_retry is not None:
                await self.before_retry()


@asynccontextmanager
async def connect_endpoint(
    endpoint: Endpoint, *, timeout_s: float, policy: type[EndpointPolicy] = EndpointPolicy
) -> AsyncGenerator[Callable[[Sampling, Limits], EndpointPolicy]]:
    """Connect to an endpoint, and yield a factory of policies, which are made per episode."""
    await in_thread(partial(import_module, "openai"))  # which takes a second, for which the loop would stand still
    import httpx
    import openai

    client = openai.AsyncOpenAI(
        base_url=endpoint.url,
        api_key=endpoint.key or "none",  # the client requires a key
        timeout=timeout_s,
        max_retries=0,  # `EndpointPolicy` retries, with a limit in seconds, and also malformed responses
        # The limit is `max_concurrent`.
        http_client=openai.DefaultAsyncHttpxClient(limits=httpx.Limits(max_connections=None)),
    )
    async with client:
        yield lambda sampling, limits: policy(
            client, endpoint=endpoint, sampling=sampling, limits=limits, timeout_s=timeout_s
        )


def _make_rejection_error(status: int, problem: str, request_id: str | None) -> Exception:
    """Return the error of a request that is not retried; an invalid request fails only its rollout."""
    if status not in (400, 413, 422):
        return ServiceError(f"the endpoint rejected the request ({problem})", request_id=request_id)
    if "context" in problem or "too long" in problem:
        return ContextFull(f"the endpoint rejected the prompt ({problem})")
    return EnvironmentFault(f"the endpoint rejected the request ({problem})")


def _encode_message(message: Message) -> dict[str, Any]:
    """Convert a message to OpenAI's format, without its thinking."""
    names = ("role", "content", "tool_call_id", "name")
    encoded: dict[str, Any] = {key: value for key, value in message.items() if key in names}
    if not isinstance(message["content"], str):
        encoded["content"] = [
            {"type": "image_url", "image_url": {"url": part["image"]}} if part["type"] == "image" else part
            for part in message["content"]
        ]
    if calls := message.get("tool_calls"):
        encoded["tool_calls"] = [encode_tool_call(call, call["id"]) for call in calls]
    return encoded


class _MalformedResponse(Exception):
    """A response that does not follow the protocol."""


def _truncate(text: str) -> str:
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS]


def read_reply(content: bytes, forced: str | None) -> Reply:
    """Parse the response to a chat (`forced` is None), or to a prompt with the forced start of its completion."""
    try:
        response = json.loads(content)
        choice = response["choices"][0]
        source = choice["message"] if forced is None else {"content": f"{forced}{choice['text']}"}
        message, malformed_calls = _read_message(source)
        usage: dict[str, Any] = response.get("usage") or {}
        counts = [usage.get(f"{name}_tokens") or 0 for name in ("prompt", "completion")]
        prompt_tokens, completion_tokens = (min(max(0, int(count)), _MAX_TOKENS) for count in counts)
        is_truncated, request_id = choice.get("finish_reason") == "length", response.get("id")
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        excerpt = _truncate(content[:_MAX_MESSAGE_CHARS].decode(errors="replace"))
        raise _MalformedResponse(f"malformed response ({type(error).__name__}): {excerpt}") from error
    turn = Turn(
        prompt=as_prompt(np.arange(max(prompt_tokens, 1), dtype=np.int32)),
        completion=np.arange(completion_tokens, dtype=np.int32),
        logprobs=np.zeros(completion_tokens, np.float32),
        sampled_mask=np.ones(completion_tokens, np.bool_),
        stop="length" if is_truncated else "stop",
        version=0,
        request_id=None if request_id is None else str(request_id),
    )
    return Reply(str(message["content"]), message, turn, turn.prompt + as_prompt(turn.completion), malformed_calls)


def _read_message(source: Mapping[str, Any]) -> tuple[Message, tuple[str, ...]]:
    """Return the message of a response, and the tool calls whose arguments are not a JSON object."""
    content = source.get("content") or ""
    if not isinstance(content, str):  # some endpoints return parts
        content = "".join(str(part["text"]) for part in content if part["type"] == "text")
    message: Message = {"role": "assistant", "content": content}
    if thinking := source.get("reasoning_content") or source.get("reasoning"):
        message["thinking"] = str(thinking)
    calls, malformed = list[ToolCall](), list[str]()
    for call in cast("Sequence[Mapping[str, Any]]", source.get("tool_calls") or ()):
        function = call["function"]
        try:
            arguments = parse_arguments(call["id"], function["arguments"], field="arguments")
        except Rejection:
            malformed.append(f"{function['name']}({function['arguments']})")
        else:
            calls.append({"id": call["id"], "name": function["name"], "arguments": arguments})
    if calls:
        message["tool_calls"] = calls
    return message, tuple(malformed)
