"""A model behind an endpoint that speaks OpenAI's protocol, for evaluation only.

Invariant: nothing that it says is trained on. An endpoint gives no tokens: the turns of a record count them, as the
endpoint does, and number them from 0.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast, override
from urllib.parse import urlsplit

import numpy as np

from rlkit.errors import ContextFull, EnvironmentFault, LimitReached, ServiceError, UsageError
from rlkit.policy import ChatRequest, Limits, Policy, Reply, Sampler, SampleRequest
from rlkit.types import Completion, Message, Prompt, Sampling, ToolCall, Turn, as_prompt

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_SHOWN_CHARS = 300

_MOST_TOKENS = 1 << 24
"""Limit of the tokens in one answer, whatever an endpoint says: its turn holds a number for each."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a model.

    Args:
        url: up to and with `/v1`.
        model: its name there.
        key: of the account, where one is needed.

    Raises:
        UsageError: the URL is not an HTTP address, or no HTTP header can hold the key.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            known = False
        if not known:
            raise UsageError(f"the endpoint {self.url!r} is no address of the form https://HOST/v1")
        if self.key and not (self.key.isascii() and self.key.isprintable()):
            raise UsageError("OPENAI_API_KEY: the key has a line break or a character outside of ASCII; copy it again")


class EndpointPolicy(Policy):
    """An endpoint as the policy of one episode.

    Args:
        client: connection to the endpoint.
        endpoint: its model and key.
        sampling: the settings of the evaluation.
        limits: what the rollout may use.
        timeout_s: seconds for which a failed request is made again.
    """

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
                raise EnvironmentFault("an endpoint cannot be made to begin a reply with given words")
            body["messages"] = [_written(message) for message in request.messages]
            if request.tools:
                body["tools"] = [{"type": "function", "function": dict(tool)} for tool in request.tools]
        else:
            forced = request.forced if len(request.forced) else ""
            if not isinstance(request.prompt, str) or not isinstance(forced, str):
                raise EnvironmentFault("an endpoint has no tokens: give it texts")
            body["prompt"] = request.prompt + forced
            if request.stop is not None:
                body["stop"] = [request.stop] if isinstance(request.stop, str) else list(request.stop)
        clock = asyncio.get_running_loop().time
        started = clock()
        reply = await self._ask(self._settings(request) | body, forced)
        turn = replace(reply.turn, seconds=clock() - started)
        self._turns.append(turn)
        return replace(reply, turn=turn)

    def _settings(self, request: SampleRequest | ChatRequest) -> dict[str, Any]:
        most = self._limits.max_turns
        if most is not None and len(self._turns) >= most:
            raise LimitReached(f"the rollout has had its {most} turns (max_turns)")
        own = self._sampling
        return {
            "model": self._endpoint.model,
            "max_tokens": min(request.max_tokens or own.max_tokens, own.max_tokens),
            "temperature": own.temperature if request.temperature is None else request.temperature,
            "top_p": own.top_p,
            **({"stop": list(own.stop)} if own.stop else {}),
        }

    async def _ask(self, body: Mapping[str, Any], forced: str | None) -> Reply:
        """Ask until there is an answer that can be read, for at most `timeout_s`; `forced` is None for a chat."""
        import httpx
        import openai

        clock = asyncio.get_running_loop().time
        until_s, wait_s = clock() + self._timeout_s, _FIRST_WAIT_S
        path = "/chat/completions" if forced is None else "/completions"
        headers = {} if self._endpoint.key else {"Authorization": openai.omit}
        while True:
            request_id = None
            try:
                async with asyncio.timeout(self._timeout_s):  # a client's own limit is on each piece of an answer
                    response = await self._client.post(
                        path, cast_to=httpx.Response, body=body, options={"headers": headers}
                    )
                return _read_reply(response.content, forced)
            except TimeoutError:
                trouble = f"no whole answer within {self._timeout_s:g} s"
            except _UnreadableAnswer as error:
                trouble = str(error)
            except openai.APIConnectionError as error:
                trouble = f"{type(error.__cause__).__name__}: {error.__cause__}"
            except openai.APIStatusError as error:
                trouble, request_id = f"{error.status_code}: {_on_a_line(error.response.text)}", error.request_id
                if error.status_code not in _RETRIED:
                    raise _refusal(error.status_code, trouble, request_id) from error
            if clock() + wait_s > until_s:
                message = f"the endpoint {self._client.base_url} does not answer: {trouble}"
                raise ServiceError(message, request_id=request_id)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


class NoSampler(Sampler):
    """Placeholder for the weights of an evaluation that has none; it is never asked."""

    @property
    @override
    def version(self) -> int:
        return 0

    @override
    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        raise AssertionError("an endpoint has no weights that could be sampled from")


@asynccontextmanager
async def connect_endpoint(
    endpoint: Endpoint, *, timeout_s: float
) -> AsyncGenerator[Callable[[Sampling, Limits], EndpointPolicy]]:
    """Connect to an endpoint, and give a factory of policies, one for each episode."""
    import httpx
    import openai

    client = openai.AsyncOpenAI(
        base_url=endpoint.url,
        api_key=endpoint.key or "none",  # the client insists on one
        timeout=timeout_s,
        max_retries=0,  # retries here have a limit in seconds, and include answers that cannot be read
        http_client=openai.DefaultAsyncHttpxClient(
            limits=httpx.Limits(max_connections=None)
        ),  # `max_live` is the limit
    )
    async with client:
        yield lambda sampling, limits: EndpointPolicy(
            client, endpoint=endpoint, sampling=sampling, limits=limits, timeout_s=timeout_s
        )


def _refusal(status: int, trouble: str, request_id: str | None) -> Exception:
    """Return the error for a request that is not retried: one that is wrong concerns its own rollout only."""
    if status not in (400, 413, 422):
        return ServiceError(f"the endpoint refuses ({trouble})", request_id=request_id)
    if "context" in trouble or "too long" in trouble:
        return ContextFull(f"the endpoint refuses a prompt ({trouble})")
    return EnvironmentFault(f"the endpoint refuses a request ({trouble})")


def _written(message: Message) -> dict[str, Any]:
    """Return a message in the protocol's shape; thinking is not sent back, as models are made for."""
    written: dict[str, Any] = {
        key: value for key, value in message.items() if key in ("role", "content", "tool_call_id", "name")
    }
    if not isinstance(message["content"], str):
        written["content"] = [
            {"type": "image_url", "image_url": {"url": part["image"]}} if part["type"] == "image" else part
            for part in message["content"]
        ]
    if calls := message.get("tool_calls"):
        written["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for call in calls
        ]
    return written


class _UnreadableAnswer(Exception):
    """An answer that is not of the protocol."""


def _on_a_line(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARS]


def _read_reply(content: bytes, forced: str | None) -> Reply:
    """Read the answer to a chat, or to a prompt with what its completion was forced to begin with."""
    try:
        answer = json.loads(content)
        choice = answer["choices"][0]
        message, malformed = _read_message(
            choice["message"] if forced is None else {"content": f"{forced}{choice['text']}"}
        )
        usage: dict[str, Any] = answer.get("usage") or {}
        given, said = (
            min(max(0, int(usage.get(f"{name}_tokens") or 0)), _MOST_TOKENS) for name in ("prompt", "completion")
        )
        cut, request_id = choice.get("finish_reason") == "length", answer.get("id")
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        shown = _on_a_line(content[:_SHOWN_CHARS].decode(errors="replace"))
        raise _UnreadableAnswer(f"its answer cannot be read ({type(error).__name__}): {shown}") from error
    turn = Turn(
        prompt=as_prompt(np.arange(max(given, 1), dtype=np.int32)),
        completion=np.arange(said, dtype=np.int32),
        logprobs=np.zeros(said, np.float32),
        sampled=np.ones(said, np.bool_),
        stop="length" if cut else "stop",
        version=0,
        request_id=None if request_id is None else str(request_id),
    )
    return Reply(str(message["content"]), message, turn, turn.prompt + as_prompt(turn.completion), malformed)


def _read_message(given: Mapping[str, Any]) -> tuple[Message, tuple[str, ...]]:
    """Return a message of the endpoint's, and those of its calls whose arguments are no JSON object."""
    content = given.get("content") or ""
    if not isinstance(content, str):  # some give it in parts
        content = "".join(str(part["text"]) for part in content if part["type"] == "text")
    message: Message = {"role": "assistant", "content": content}
    if thinking := given.get("reasoning_content") or given.get("reasoning"):
        message["thinking"] = str(thinking)
    calls, malformed = list[ToolCall](), list[str]()
    for call in cast("Sequence[Mapping[str, Any]]", given.get("tool_calls") or ()):
        function = call["function"]
        try:
            arguments: object = json.loads(function["arguments"] or "{}")
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            calls.append({"id": call["id"], "name": function["name"], "arguments": cast("Any", arguments)})
        else:
            malformed.append(f"{function['name']}({function['arguments']})")
    if calls:
        message["tool_calls"] = calls
    return message, tuple(malformed)
