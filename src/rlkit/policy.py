"""The policy interface that environments use, and the sampler interface behind it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, override

from rlkit.errors import EnvironmentFault
from rlkit.types import Completion, Message, Prompt, Reply, Sampling, Tokens, Tool, Turn

if TYPE_CHECKING:
    from rlkit.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a rollout: its turns, and the tokens of a prompt and its completion together."""

    max_turns: int | None = None
    context_tokens: int | None = None


NO_OPPONENTS = "opponent(): this policy has no weights but its own; play it in a training run"
_NO_DEMONSTRATIONS = "demonstrate(): this policy only samples; train on conversations in the process of a training run"


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The arguments of `Policy.sample`."""

    prompt: str | Prompt | Sequence[int] | Tokens
    forced: str | Sequence[int]
    max_tokens: int | None
    temperature: float | None
    stop: Sequence[str] | Sequence[int] | None
    role: str | None = None
    opponent: int | str | None = None


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
    role: str | None = None
    opponent: int | str | None = None


class Policy(ABC):
    """The handle through which a rollout samples, with the record of its turns. Subclasses implement `_respond`."""

    def __init__(self, *, sampling: Sampling, limits: Limits) -> None:
        self._sampling = sampling
        self._limits = limits
        self._turns: list[Turn] = []
        self._has_opponents = False
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
        """Add a reward to the last turn of this role, for estimators that assign credit by turn."""
        self._reward_turn(value, None)

    def role(self, name: str) -> Policy:
        """Return a handle of this policy whose turns belong to a role, with a reward of its own (`Outcome.rewards`)."""
        return _RoleHandle(self, name, None)

    def opponent(self, *, step: int | None = None, checkpoint: str | None = None, role: str = "opponent") -> Policy:
        """Return a handle that samples from frozen weights. Its turns are recorded and never trained.

        Args:
            step: plays with the last checkpoint that `checkpoint.every` asks for up to this step; 0 is the start. A
                number below 0 counts back from the newest weights.
            checkpoint: `tinker://` path of sampler weights of the same model, instead of a step.
            role: role of the turns in records.

        Raises:
            ValueError: there is not exactly one of `step` and `checkpoint`, or one has the wrong type.
            EnvironmentFault: this policy has no weights but its own, as a served model.
        """
        is_step = type(step) is int and checkpoint is None
        if not is_step and not (step is None and isinstance(checkpoint, str) and checkpoint):
            raise ValueError(f"opponent() needs a whole number as step, or a checkpoint; got {step!r}, {checkpoint!r}")
        if not self._has_opponents:
            raise EnvironmentFault(NO_OPPONENTS)
        return _RoleHandle(self, role, step if checkpoint is None else checkpoint)

    def demonstrate(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), trained: Sequence[int] | None = None
    ) -> None:
        """Record messages of a conversation as if the model had sampled them, to train on them by `cross_entropy`.

        Args:
            messages: the `weight` of a message counts as in the files of `source`.
            trained: indices of the messages to train on; None for all of the assistant.

        Raises:
            EnvironmentFault: the conversation does not fit the context, the chat format cannot write it as a prompt
                and its reply, or the environment is one that samples.
        """
        raise EnvironmentFault(_NO_DEMONSTRATIONS)

    def replay(self, turns: Sequence[Turn]) -> None:
        """Record the turns of an earlier episode, token for token; errors as in `demonstrate`."""
        raise EnvironmentFault(_NO_DEMONSTRATIONS)

    def _reward_turn(self, value: float, role: str | None) -> None:
        """Add a reward to the last turn of a role that is not frozen; the base class ignores it."""
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

    async def count_tokens(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> int:
        """Return the number of tokens of the prompt of `chat`, and record nothing; errors as in `chat`."""
        raise EnvironmentFault("count_tokens(): only the server of this policy's model knows its tokens")


class _RoleHandle(Policy):
    """A role of a policy. Its requests are those of the policy, which records them under the role."""

    def __init__(self, policy: Policy, role: str, opponent: int | str | None) -> None:
        if not isinstance(cast("object", role), str) or not re.fullmatch(r"[\w.-]{1,64}", role):
            raise ValueError(f"the role {role!r} must have 1 to 64 letters, digits, `_`, `-` or `.`")
        super().__init__(sampling=policy._sampling, limits=policy._limits)
        self.endpoint_host = policy.endpoint_host
        self._turns, self._has_opponents = policy._turns, policy._has_opponents
        self._policy, self._role, self._opponent = policy, role, opponent

    @override
    def _reward_turn(self, value: float, role: str | None) -> None:
        if self._opponent is not None:
            raise ValueError("an opponent is not trained, and takes no reward")
        self._policy._reward_turn(value, role or self._role)

    @override
    async def _respond(self, request: SampleRequest | ChatRequest) -> Reply:
        opponent = self._opponent if request.opponent is None else request.opponent
        return await self._policy._respond(replace(request, role=request.role or self._role, opponent=opponent))

    @override
    async def count_tokens(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> int:
        return await self._policy.count_tokens(messages, tools=tools)


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


class NoSampler:
    """Placeholder for a sampler where nothing is sampled from weights, as with an endpoint."""

    version: int = 0

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        """Fail: there are no weights."""
        raise AssertionError("there are no weights to sample from")


type OpponentSamplers = Callable[[int | str, Callable[[], Sampler]], Awaitable[Sampler]]
"""Returns the sampler of an opponent, by its step or checkpoint and a function that returns the sampler of the newest
weights; EnvironmentFault if the opponent's weights are not available."""


class Samplers(NamedTuple):
    """Samplers of a rollout: of its first turn, of later turns, and of its opponents."""

    first: Callable[[], Sampler]
    later: Callable[[], Sampler]
    opponents: OpponentSamplers | None = None
