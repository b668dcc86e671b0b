"""`PolicyLLM`: a policy as one of Harbor's language models.

Invariant: when Harbor continues a conversation, the policy gets its own earlier messages with their thinking, so the
prompt extends their exact tokens. Harbor stores only texts; a message is found by its text and all texts before it. If
Harbor truncates the history, such as for a summary, a new segment begins.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, cast, override

from harbor.llms.base import BaseLLM, ContextLengthExceededError, LLMResponse, OutputLengthExceededError
from harbor.models.metric import UsageInfo

from rlkit.envs.harbor.agents.agent import limit_reply
from rlkit.errors import ContextFull
from rlkit.policy import Policy
from rlkit.types import Message, Reply

NO_LIMIT_TOKENS = 1 << 30  # context size reported to Harbor if it is unknown, because Harbor needs a number
_CHARS_PER_TOKEN = 3.0  # estimate before the first reply; low, so that token counts are rather too high than too low


@dataclass(slots=True, eq=False)
class _ConversationNode:
    """A conversation up to one message, and its continuations by role and text.

    `tokens` counts the whole conversation so far; None unless a reply of the policy ends it.
    """

    message: Message | None = None
    tokens: int | None = None
    next: dict[tuple[str, str], _ConversationNode] = field(default_factory=dict[tuple[str, str], "_ConversationNode"])

    def follow(self, harbor_message: Mapping[str, object]) -> _ConversationNode:
        """Return the node of the conversation with one more of Harbor's messages."""
        role, text = str(harbor_message["role"]), str(harbor_message["content"])
        if (node := self.next.get((role, text))) is not None:
            return node
        # Harbor's warnings may contain characters that no tokenizer accepts
        plain = text.encode(errors="replace").decode()
        message: Message = {"role": cast("Literal['system', 'user', 'assistant']", role), "content": plain}
        if thinking := harbor_message.get("reasoning_content"):
            message["thinking"] = str(thinking)
        self.next[role, text] = node = _ConversationNode(message)
        return node


class PolicyLLM(BaseLLM):
    """A policy as one of Harbor's language models.

    If a prompt leaves less than `reserve_tokens` of the context, nothing is sampled and Harbor gets a
    `ContextLengthExceededError`, as for a reply truncated by the end of the context. A reply truncated by `max_tokens`
    is an `OutputLengthExceededError` with its text. The policy records the reply in both cases.

    Args:
        max_tokens: limit of a reply, if less than the policy's.
        reserve_tokens: None for `max_tokens`, but at most a quarter of the context.
        temperature: None for the policy's.
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
        self.policy = policy
        self._model_name = model_name
        self._temperature = temperature
        self._max_tokens, reserved = limit_reply(policy, max_tokens)
        self.reserve_tokens = reserve_tokens or reserved
        self._root = _ConversationNode()
        self._chars_per_token = _CHARS_PER_TOKEN
        self._accepts_truncated = False

    @override
    def get_model_context_limit(self) -> int:
        return self.policy.context_tokens or NO_LIMIT_TOKENS

    @override
    def get_model_output_limit(self) -> int:
        return self._max_tokens

    @contextmanager
    def accept_truncated_replies(self) -> Generator[None]:
        """Accept truncated replies inside the context, because a truncated summary is better than none."""
        previous, self._accepts_truncated = self._accepts_truncated, True
        try:
            yield
        finally:
            self._accepts_truncated = previous

    def count_tokens(self, messages: Sequence[Mapping[str, object]]) -> int:
        """Count the tokens of a conversation: exact up to the policy's last reply, estimated after that."""
        node, exact_tokens, chars = self._root, 0, 0
        for message in messages:
            node = node.follow(message)
            chars += len(str(message["content"]))
            if node.tokens is not None:
                exact_tokens, chars = node.tokens, 0
        return exact_tokens + round(chars / self._chars_per_token)

    @override
    async def call(self, prompt: str, **kwargs: object) -> LLMResponse:
        """Return the policy's reply to a prompt, after the conversation in `message_history`.

        Raises:
            ContextLengthExceededError: the context has no room for a reply, or truncated the reply.
            OutputLengthExceededError: `max_tokens` truncated the reply.
            LimitReached: the rollout has no turns left.
            ServiceError: the service failed after the policy's own retries.
        """
        messages, node = list[Message](), self._root
        history = cast("Sequence[Mapping[str, object]] | None", kwargs.get("message_history")) or ()
        for message in [*history, {"role": "user", "content": prompt}]:
            node = node.follow(message)
            assert node.message is not None
            messages.append(node.message)
        try:
            reply = await self.policy.chat(
                messages,
                max_tokens=self._max_tokens,
                temperature=self._temperature,
                min_reply_tokens=self.reserve_tokens,
            )
        except ContextFull as error:
            raise ContextLengthExceededError(str(error)) from error
        self._record_reply(node, messages, reply)
        count = len(reply.turn.completion)
        if reply.truncated and not self._accepts_truncated:
            if count < self._max_tokens:
                raise ContextLengthExceededError(f"the end of the context cut a reply off after {count} tokens")
            detail = f"max_tokens cut a reply off after {count} tokens"
            raise OutputLengthExceededError(detail, truncated_response=reply.text)
        return LLMResponse(
            content=reply.text,
            reasoning_content=reply.thinking or None,
            model_name=self._model_name,
            usage=UsageInfo(
                prompt_tokens=len(reply.tokens) - count, completion_tokens=count, cache_tokens=0, cost_usd=0.0
            ),
        )

    def _record_reply(self, node: _ConversationNode, messages: Sequence[Message], reply: Reply) -> None:
        node.next["assistant", reply.text] = _ConversationNode(reply.message, len(reply.tokens))
        chars = sum(len(str(message["content"])) for message in messages) + len(reply.text) + len(reply.thinking)
        self._chars_per_token = max(chars, 1) / len(reply.tokens)
