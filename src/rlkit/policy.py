"""The policy interface that environments use, and the sampler interface behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlkit.types import Completion, Message, Prompt, Reply, Sampling, Tokens, Tool, Turn

if TYPE_CHECKING:
    from rlkit.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a rollout: its turns, and the tokens of a prompt and its completion together."""

    max_turns: int | None = None
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The arguments of `Policy.sample`."""

    prompt: str | Prompt | Sequence[int] | Tokens
    forced: str | Sequence[int]
    max_tokens: int | None
    temperature: float | None
    stop: Sequence[str] | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The arguments of `Policy.chat`."""

    messages: Sequence[Message]
    tools: Sequence[Tool]
    forced: str | Sequence[int]
    max_tokens: int | None
    temperature: float | None
    min_reply_tokens: int
    context_tokens: int | None
    stop: Sequence[str] = ()


class Policy(ABC):
    """The handle through which a rollout samples, with the record of its turns. Subclasses implement `_respond`."""

    def __init__(self, *, sampling: Sampling, limits: Limits) -> None:
        self._sampling = sampling
        self._limits = limits
        self._turns: list[Turn] = []
        self.endpoint_host: str | None = None
        """Name or address of this machine for clients of `endpoint` on others; None for clients on this machine."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns so far."""
        return tuple(self._turns)

    @property
    def max_tokens(self) -> int:
        """Limit of the tokens of a completion."""
        return self._sampling.max_tokens

    @property
    def context_tokens(self) -> int | None:
        """Limit of the tokens of a prompt and its completion together; None if unknown."""
        return self._limits.context_tokens

    def reward(self, value: float) -> None:
        """Add a reward to the last turn, for estimators that assign credit by turn; the base class ignores it."""
        return

    def endpoint(self) -> AbstractAsyncContextManager[Endpoint]:
        """Serve this policy to clients of OpenAI until the end of the block, see `rlkit.endpoint.open_endpoint`."""
        from rlkit.endpoint import open_endpoint

        return open_endpoint(self, host=self.endpoint_host)

    @abstractmethod
    async def _respond(self, request: SampleRequest | ChatRequest) -> Reply:
        """Complete a request of `sample` or `chat`."""

    async def sample(
        self,
        prompt: str | Prompt | Sequence[int] | Tokens,
        *,
        forced: str | Sequence[int] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] | Sequence[int] | None = None,
    ) -> Reply:
        """Complete a prompt without a chat template.

        Args:
            prompt: text or tokens. A prompt that begins with the tokens of an earlier turn extends that turn.
            forced: prefix of the completion, as text or tokens; never trained on.
            max_tokens: limit of the completion; the run's limit applies too.
            temperature: temperature instead of the run's.
            stop: strings or token ids instead of the run's.

        Raises:
            LimitReached: the rollout has used up its turns or its context.
            EnvironmentFault: the service rejected the prompt.
            ValueError: the prompt is empty, or a setting is out of range.
            ServiceError: the service failed after retries.
        """
        return await self._respond(SampleRequest(prompt, forced, max_tokens, temperature, stop))

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        forced: str | Sequence[int] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        min_reply_tokens: int = 1,
        context_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Return the assistant's next message.

        If `messages` continues an earlier reply, the prompt reuses the exact tokens of that reply. Conversations may
        branch: each branch reuses the tokens up to the last reply that it shares.

        Args:
            messages: the conversation so far.
            tools: functions that the model may call.
            forced, max_tokens, temperature: see `sample`.
            min_reply_tokens: tokens that the context must have left for the reply.
            context_tokens: limit of prompt and completion together, in addition to the run's; ignored if the policy is
                an endpoint.
            stop: strings that end the reply, in addition to the end of a turn; the reply's text ends before them.

        Raises:
            ContextFull: the context has less than `min_reply_tokens` tokens left.
            LimitReached, EnvironmentFault, ValueError, ServiceError: as in `sample`.
        """
        request = ChatRequest(messages, tools, forced, max_tokens, temperature, min_reply_tokens, context_tokens, stop)
        return await self._respond(request)


class Sampler(Protocol):
    """A client that samples from one version of the weights."""

    @property
    def version(self) -> int:
        """Number of steps that the weights were trained for."""
        ...

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        """Draw completions of one prompt.

        Raises:
            ServiceError: the service failed after retries.
        """
        ...
