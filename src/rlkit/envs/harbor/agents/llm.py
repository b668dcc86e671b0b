"""`PolicyLLM`: a policy in the place where Harbor expects a language model.

Invariant: a conversation that Harbor goes on with reaches the policy with the very messages that the policy gave, with
their thinking, so that it extends their exact tokens. Harbor keeps texts only; they are found again by all that was
said before them. Where Harbor breaks the history off, as for a summary, what follows is a new segment.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, cast, override

from harbor.llms.base import BaseLLM, ContextLengthExceededError, LLMResponse, OutputLengthExceededError
from harbor.models.metric import UsageInfo

from rlkit.errors import ContextFull
from rlkit.policy import Policy, Reply
from rlkit.types import Message

NO_LIMIT_TOKENS = 1 << 30
"""What Harbor is told of a context of which nothing is known: it must be told a number."""

_CHARS_PER_TOKEN = 3.0
"""Of text before the first reply; few, so that a count is too high rather than too low."""


@dataclass(slots=True, eq=False)
class _Said:
    """A conversation up to one message, and what follows it by role and text.

    `tokens` counts the whole conversation so far; it is None where no reply of the policy's ends it.
    """

    message: Message | None = None
    tokens: int | None = None
    next: dict[tuple[str, str], _Said] = field(default_factory=dict[tuple[str, str], "_Said"])

    def then(self, message: Mapping[str, object]) -> _Said:
        """The conversation with one more of Harbor's messages."""
        role, text = str(message["role"]), str(message["content"])
        if (known := self.next.get((role, text))) is not None:
            return known
        # a warning of Harbor's may quote what no tokenizer takes
        plain = text.encode(errors="replace").decode()
        said: Message = {"role": cast("Literal['system', 'user', 'assistant']", role), "content": plain}
        if thinking := message.get("reasoning_content"):
            said["thinking"] = str(thinking)
        self.next[role, text] = made = _Said(said)
        return made


class PolicyLLM(BaseLLM):
    """A policy as one of Harbor's language models.

    Room for a reply is reserved: where a prompt leaves less than `reserve_tokens` of the context, nothing is sampled,
    and Harbor is told that the context is full. So is it of a reply that the end of the context cut off. One that
    `max_tokens` cut off is an `OutputLengthExceededError` with its text. Either was recorded by the policy before.

    Args:
        max_tokens: limit of a reply, where that is to be less than the policy's own.
        reserve_tokens: None for `max_tokens`, but at most a quarter of the context.
        temperature: None for the policy's own.

    Its `seconds`, `prompt_tokens` and `completion_tokens` count all requests.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        model_name: str,
        max_tokens: int | None = None,
        reserve_tokens: int | None = None,
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        self._policy = policy
        self._model_name = model_name
        self._max_tokens = min(max_tokens or policy.max_tokens, policy.max_tokens)
        self._temperature = temperature
        context = policy.context_tokens
        reserved = self._max_tokens if context is None else min(self._max_tokens, max(context // 4, 1))
        self.reserve_tokens = reserve_tokens or reserved
        self.seconds = 0.0
        self.prompt_tokens = self.completion_tokens = 0
        self._root = _Said()
        self._chars_per_token = _CHARS_PER_TOKEN
        self._takes_cut = False

    @override
    def get_model_context_limit(self) -> int:
        return self._policy.context_tokens or NO_LIMIT_TOKENS

    @override
    def get_model_output_limit(self) -> int:
        return self._max_tokens

    @contextmanager
    def cut_replies_taken(self) -> Generator[None]:
        """Inside, a reply that is cut off is a reply like others: what there is of a summary is better than none."""
        before, self._takes_cut = self._takes_cut, True
        try:
            yield
        finally:
            self._takes_cut = before

    def tokens(self, messages: Sequence[Mapping[str, object]]) -> int:
        """How many tokens a conversation has: exact up to the last reply of the policy's, estimated after that."""
        node, known, after = self._root, 0, 0
        for message in messages:
            node = node.then(message)
            after += len(str(message["content"]))
            if node.tokens is not None:
                known, after = node.tokens, 0
        return known + round(after / self._chars_per_token)

    @override
    async def call(self, prompt: str, **kwargs: object) -> LLMResponse:
        """Ask the policy for the reply to a prompt, after the conversation in `message_history`.

        Raises:
            ContextLengthExceededError: the context has no room for a reply, or not for all of it.
            OutputLengthExceededError: `max_tokens` cut the reply off.
            LimitReached: the rollout has had its turns.
            ServiceError: the service failed after the policy's own retries.
        """
        messages, node = list[Message](), self._root
        history = cast("Sequence[Mapping[str, object]] | None", kwargs.get("message_history")) or ()
        for given in [*history, {"role": "user", "content": prompt}]:
            node = node.then(given)
            assert node.message is not None
            messages.append(node.message)
        started = time.monotonic()
        try:
            reply = await self._policy.chat(
                messages, max_tokens=self._max_tokens, temperature=self._temperature, room=self.reserve_tokens
            )
        except ContextFull as error:
            raise ContextLengthExceededError(str(error)) from error
        finally:
            self.seconds += time.monotonic() - started
        self._learn(node, messages, reply)
        count = len(reply.turn.completion)
        if reply.truncated and not self._takes_cut:
            if count < self._max_tokens:
                raise ContextLengthExceededError(f"the end of the context cut a reply off after {count} tokens")
            cut_off = f"max_tokens cut a reply off after {count} tokens"
            raise OutputLengthExceededError(cut_off, truncated_response=reply.text)
        return LLMResponse(
            content=reply.text,
            reasoning_content=reply.thinking or None,
            model_name=self._model_name,
            usage=UsageInfo(
                prompt_tokens=len(reply.tokens) - count, completion_tokens=count, cache_tokens=0, cost_usd=0.0
            ),
        )

    def _learn(self, node: _Said, messages: Sequence[Message], reply: Reply) -> None:
        node.next["assistant", reply.text] = _Said(reply.message, len(reply.tokens))
        count = len(reply.turn.completion)
        self.prompt_tokens += len(reply.tokens) - count
        self.completion_tokens += count
        chars = sum(len(str(message["content"])) for message in messages) + len(reply.text) + len(reply.thinking)
        self._chars_per_token = max(chars, 1) / len(reply.tokens)
