"""What a rollout talks to: the model as environments see it, and the weights behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlkit.types import Completion, Message, Prompt, Sampling, Tokens, Tool, ToolCall, Turn


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A completion as the environment sees it.

    Args:
        text: what the model said, thinking and tool calls taken out.
        message: the same as a message, to be appended to the conversation unchanged.
        turn: the tokens that it stands for.
        tokens: the prompt and the completion, all of them; `sample` continues exactly from here.
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
        """Whether `max_tokens` cut the reply off."""
        return self.turn.stop == "length"


class Policy(Protocol):
    """The model as a rollout uses it."""

    @property
    def max_tokens(self) -> int:
        """Tokens that one completion may have, by the run's setting."""
        ...

    @property
    def context_tokens(self) -> int | None:
        """Tokens that a prompt and its completion may have together; None where nothing is known of a limit."""
        ...

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
        ...

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
        """The assistant's next message. A conversation that goes on from an earlier reply extends its exact tokens.

        Args:
            messages: the conversation so far.
            tools: that the model may call.
            forced: as for `sample`.
            max_tokens: as for `sample`.
            temperature: as for `sample`.
            room: tokens that the context must have left for the reply, which is otherwise not asked for.
            context_tokens: that a prompt and its completion may have together, if less is wanted than the run's. An
                endpoint counts them only afterwards, and does not heed this.

        Raises:
            ContextFull: the context has less room than that.
            LimitReached: as for `sample`, as all the others.
        """
        ...

    def reward(self, value: float) -> None:
        """Give the last turn a reward of its own, for estimators that assign credit by turn."""
        ...


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


@dataclass(frozen=True, slots=True)
class Limits:
    """What a rollout may use: turns in all, and tokens in one prompt and its completion together."""

    max_turns: int | None = None
    context_tokens: int | None = None
