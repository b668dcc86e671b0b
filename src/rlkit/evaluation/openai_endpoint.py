"""A model behind an endpoint that speaks OpenAI's protocol, for evaluation only.

Invariant: nothing that it says is trained on. An endpoint gives no tokens: the turns of a record count them, as the
endpoint does, and hold their places' numbers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import numpy as np

from rlkit.errors import ContextFull, EnvironmentFault, LimitReached, ServiceError, UsageError
from rlkit.policy import Limits, Policy, Reply, Sampler
from rlkit.types import Completion, Message, Prompt, Sampling, Tokens, Tool, ToolCall, Turn, as_prompt

if TYPE_CHECKING:
    import httpx

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_SHOWN_CHARS = 300

_MOST_TOKENS = 1 << 24
"""In one answer, whatever an endpoint says: its turn holds a number for each."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a model is.

    Args:
        url: up to and with `/v1`.
        model: its name there.
        key: of the account, where one is needed.

    Raises:
        UsageError: the address is none.
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


class EndpointPolicy(Policy):
    """An endpoint as the policy of one episode.

    Args:
        client: of the endpoint.
        model: its name there.
        sampling: the settings of the evaluation.
        limits: what the rollout may use.
        timeout_s: for which a request is made again.
    """

    def __init__(
        self, client: httpx.AsyncClient, *, model: str, sampling: Sampling, limits: Limits, timeout_s: float
    ) -> None:
        self._client = client
        self._model = model
        self._sampling = sampling
        self._limits = limits
        self._timeout_s = timeout_s
        self._turns: list[Turn] = []

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The record so far."""
        return tuple(self._turns)

    @property
    def max_tokens(self) -> int:  # noqa: D102  inherited
        return self._sampling.max_tokens

    @property
    def context_tokens(self) -> int | None:  # noqa: D102  inherited
        return self._limits.context_tokens

    async def chat(  # noqa: D102  inherited
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        forced: str | Sequence[int] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        room: int = 1,
        context_tokens: int | None = None,
    ) -> Reply:
        if len(forced):
            raise EnvironmentFault("an endpoint cannot be made to begin a reply with given words")
        asked = self._request(max_tokens, temperature)
        asked["messages"] = [_written(message) for message in messages]
        if tools:
            asked["tools"] = [{"type": "function", "function": dict(tool)} for tool in tools]
        started = asyncio.get_running_loop().time()
        return self._recorded(await self._answer("chat/completions", asked, _chatted), started)

    async def sample(  # noqa: D102  inherited
        self,
        prompt: str | Prompt | Sequence[int] | Tokens,
        *,
        forced: str | Sequence[int] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] | Sequence[int] | None = None,
    ) -> Reply:
        if not isinstance(prompt, str) or (not isinstance(forced, str) and len(forced)):
            raise EnvironmentFault("an endpoint has no tokens: give it texts")
        asked = self._request(max_tokens, temperature)
        asked["prompt"] = prompt + (forced if isinstance(forced, str) else "")
        if stop is not None:
            asked["stop"] = [stop] if isinstance(stop, str) else list(stop)
        started = asyncio.get_running_loop().time()
        begun = forced if isinstance(forced, str) else ""
        return self._recorded(await self._answer("completions", asked, lambda one: _completed(one, begun)), started)

    def reward(self, value: float) -> None:
        """Nothing: turns are given rewards to be trained on."""

    def _request(self, max_tokens: int | None, temperature: float | None) -> dict[str, Any]:
        most = self._limits.max_turns
        if most is not None and len(self._turns) >= most:
            raise LimitReached(f"the rollout has had its {most} turns (max_turns)")
        own = self._sampling
        return {
            "model": self._model,
            "max_tokens": min(max_tokens or own.max_tokens, own.max_tokens),
            "temperature": own.temperature if temperature is None else temperature,
            "top_p": own.top_p,
            **({"stop": list(own.stop)} if own.stop else {}),
        }

    async def _answer(self, path: str, asked: Mapping[str, Any], read: Callable[[dict[str, Any]], _Answer]) -> _Answer:
        import httpx

        clock = asyncio.get_running_loop().time
        until_s, wait_s = clock() + self._timeout_s, _FIRST_WAIT_S
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):  # a client's own limit is on each piece of an answer
                    response = await self._client.post(path, json=asked)
                if response.is_success:
                    return _understood(response.content, read)
                trouble = f"{response.status_code}: {' '.join(response.text.split())[:_SHOWN_CHARS]}"
                if response.status_code not in _AGAIN:
                    raise _refused(response.status_code, trouble)
            except TimeoutError:
                trouble = f"no whole answer within {self._timeout_s:g} s"
            except _Odd as error:
                trouble = str(error)
            except httpx.HTTPError as error:
                trouble = f"{type(error).__name__}: {error}"
            if clock() + wait_s > until_s:
                raise ServiceError(f"the endpoint {self._client.base_url} does not answer: {trouble}")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _recorded(self, answer: _Answer, started_s: float) -> Reply:
        turn = Turn(
            prompt=as_prompt(np.arange(answer.given, dtype=np.int32)),
            completion=np.arange(answer.said, dtype=np.int32),
            logprobs=np.zeros(answer.said, np.float32),
            sampled=np.ones(answer.said, np.bool_),
            stop="length" if answer.cut else "stop",
            version=0,
            seconds=asyncio.get_running_loop().time() - started_s,
            request_id=answer.request_id,
        )
        self._turns.append(turn)
        tokens = turn.prompt + as_prompt(turn.completion)
        return Reply(str(answer.message["content"]), answer.message, turn, tokens, answer.malformed)


class NoSampler(Sampler):
    """What stands where an evaluation has weights; it is never asked."""

    @property
    def version(self) -> int:  # noqa: D102  inherited
        return 0

    async def sample(  # noqa: D102  inherited
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        raise AssertionError("an endpoint has no weights that could be sampled from")


@asynccontextmanager
async def connected(
    endpoint: Endpoint, *, timeout_s: float
) -> AsyncGenerator[Callable[[Sampling, Limits], EndpointPolicy]]:
    """A connection, as what makes a policy for each episode."""
    import httpx

    headers = {} if endpoint.key is None else {"Authorization": f"Bearer {endpoint.key}"}
    limits = httpx.Limits(max_connections=None)  # how many ask at once is the evaluation's to say
    async with httpx.AsyncClient(
        base_url=endpoint.url, headers=headers, timeout=timeout_s, limits=limits, follow_redirects=True
    ) as client:

        def make(sampling: Sampling, limits: Limits) -> EndpointPolicy:
            return EndpointPolicy(client, model=endpoint.model, sampling=sampling, limits=limits, timeout_s=timeout_s)

        yield make


def _refused(status: int, trouble: str) -> Exception:
    """A request that is wrong is the rollout's own; one that no request of the account gets through ends it all."""
    if status in (400, 413, 422):
        if "context" in trouble or "too long" in trouble:
            return ContextFull(f"the endpoint refuses a prompt ({trouble})")
        return EnvironmentFault(f"the endpoint refuses a request ({trouble})")
    return ServiceError(f"the endpoint refuses ({trouble})")


def _written(message: Message) -> dict[str, Any]:
    """A message as the protocol has it; thinking is not sent back, as models are made for."""
    written: dict[str, Any] = {"role": message["role"], "content": _content(message)}
    if calls := message.get("tool_calls"):
        written["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for call in calls
        ]
    if "tool_call_id" in message:
        written["tool_call_id"] = message["tool_call_id"]
    if "name" in message:
        written["name"] = message["name"]
    return written


def _content(message: Message) -> object:
    content = message["content"]
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": part["image"]}} if part["type"] == "image" else part
        for part in content
    ]


class _Odd(Exception):
    """An answer that is not of the protocol."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What an endpoint said: counts of tokens given and said, whether it was cut off, and calls that are no JSON."""

    message: Message
    given: int
    said: int
    cut: bool
    request_id: str | None
    malformed: tuple[str, ...] = ()


def _understood(content: bytes, read: Callable[[dict[str, Any]], _Answer]) -> _Answer:
    try:
        return read(json.loads(content))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        shown = " ".join(content[:_SHOWN_CHARS].decode(errors="replace").split())
        raise _Odd(f"its answer cannot be read ({type(error).__name__}): {shown}") from error


def _chatted(answer: dict[str, Any]) -> _Answer:
    message, malformed = _read(answer["choices"][0]["message"])
    return _counted(answer, message, malformed)


def _completed(answer: dict[str, Any], begun: str) -> _Answer:
    return _counted(answer, {"role": "assistant", "content": f"{begun}{answer['choices'][0]['text']}"})


def _counted(answer: dict[str, Any], message: Message, malformed: tuple[str, ...] = ()) -> _Answer:
    usage = cast("dict[str, Any]", answer.get("usage") or {})
    given, said = (
        min(max(0, int(usage.get(f"{name}_tokens") or 0)), _MOST_TOKENS) for name in ("prompt", "completion")
    )
    cut = answer["choices"][0].get("finish_reason") == "length"
    name = answer.get("id")
    return _Answer(message, max(given, 1), said, cut, None if name is None else str(name), malformed)


def _read(given: Mapping[str, Any]) -> tuple[Message, tuple[str, ...]]:
    """A message of the endpoint's, and the arguments of those of its calls that are no JSON."""
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
