"""The model as environments see it, and the weights behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlkit.types import Completion, Message, Prompt, Sampling, Tokens, Tool, ToolCall, Turn


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A completion as the environment sees it.

    Args:
        text: the reply without thinking and tool calls.
        message: the whole reply as a message, to be appended to the conversation unchanged.
        turn: the record of the completion.
        tokens: the whole prompt and the completion; `sample` continues exactly from here.
        malformed: raw texts of tool calls that could not be parsed.
    """

    text: str
    message: Message
    turn: Turn
    tokens: Prompt
    malformed: tuple[str, ...] = ()

    @property
    def thinking(self) -> str:
        """The model's reasoning, "" where there is none."""
        return self.message.get("thinking", "")

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """The tool calls that the model asked for."""
        return self.message.get("tool_calls", [])

    @property
    def truncated(self) -> bool:
        """True if `max_tokens` cut the reply off."""
        return self.turn.stop == "length"


@dataclass(frozen=True, slots=True)
class Limits:
    """Turns that a rollout may take, and tokens that one prompt and its completion may have together."""

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
    room: int
    context_tokens: int | None


class Policy(ABC):
    """The model as one rollout uses it, with the record of its turns. Subclasses implement `_respond`."""

    def __init__(self, *, sampling: Sampling, limits: Limits) -> None:
        self._sampling = sampling
        self._limits = limits
        self._turns: list[Turn] = []

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The record so far."""
        return tuple(self._turns)

    @property
    def max_tokens(self) -> int:
        """Tokens that one completion may have, by the run's setting."""
        return self._sampling.max_tokens

    @property
    def context_tokens(self) -> int | None:
        """Tokens that a prompt and its completion may have together; None where no limit is known."""
        return self._limits.context_tokens

    def reward(self, value: float) -> None:
        """Give the last turn a reward of its own, for estimators that assign credit by turn."""
        return

    @abstractmethod
    async def _respond(self, request: SampleRequest | ChatRequest) -> Reply:
        """Answer a call of `sample` or `chat`."""

    async def sample(
        self,
        prompt: str | Prompt | Sequence[int] | Tokens,
        *,
        forced: str | Sequence[int] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] | Sequence[int] | None = None,
    ) -> Reply:
        """Complete a prompt as it stands, with no chat template.

        Args:
            prompt: text or tokens. One that continues the tokens of an earlier turn is recorded as its extension.
            forced: text or tokens that the completion must begin with; they get no advantage.
            max_tokens: less than the run's setting, if less is wanted.
            temperature: instead of the run's setting.
            stop: strings or token ids, instead of the run's setting.

        Raises:
            LimitReached: the rollout has used up its turns or its context.
            EnvironmentFault: the service refuses the prompt.
            ValueError: the prompt is empty, or a setting makes no sense.
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
        room: int = 1,
        context_tokens: int | None = None,
    ) -> Reply:
        """Return the assistant's next message; one that continues an earlier reply extends its exact tokens.

        Args:
            messages: the conversation so far.
            tools: functions that the model may call.
            forced: see `sample`.
            max_tokens: see `sample`.
            temperature: see `sample`.
            room: tokens that the context must have left for the reply; with fewer, the model is not asked.
            context_tokens: limit of the prompt and its completion together, below the run's. An endpoint cannot count
                tokens beforehand and ignores it.

        Raises:
            ContextFull: the context has less room than `room`.
            LimitReached: see `sample`, as for the other errors.
        """
        request = ChatRequest(messages, tools, forced, max_tokens, temperature, room, context_tokens)
        return await self._respond(request)


class Sampler(Protocol):
    """One version of the weights, ready to be sampled from."""

    @property
    def version(self) -> int:
        """Optimiser steps that these weights have taken."""
        ...

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        """Draw completions of one prompt.

        Raises:
            ServiceError: the service failed after retries.
        """
        ...
