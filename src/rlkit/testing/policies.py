"""Policies without a model: tests of environments that are instant, offline and exact.

    policy = rlkit.testing.ScriptedPolicy(["olleh"])
    assert await Reverse("hello").rollout(policy) == 1.0

Invariant: only the sampler is replaced. What records the turns, keeps the limits and extends the tokens of a
conversation is the `RecordingPolicy` that a run uses.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlkit.chat.format import ChatFormat, Parsed, parse_text
from rlkit.errors import UsageError
from rlkit.policy import Limits, Sampler
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.types import Completion, Json, Message, Prompt, Sampling, StopReason, Tokens, Tool, ToolCall, as_prompt

MAX_TOKENS = 1 << 20
"""Long enough that a script is cut short only where a test asks for it."""

UNLIMITED = Limits()

PATIENCE = Limits(max_turns=32)
"""How long noise plays with an environment that waits for a good reply."""

LOGPROB = -1.0
"""What a scripted sampler gives as the log-probability of each token."""

BEGIN, END = 256, 257
"""The tokens that open a conversation and close a message."""

ROLES: Mapping[str, int] = {"system": 258, "user": 259, "assistant": 260, "tool": 261}
"""The token that opens a message of each role."""


class ByteChat(ChatFormat):
    """A chat format over UTF-8 bytes, in the shape of ChatML: `BEGIN`, then `role text END newline` for each message.

    Tokens 0–255 are bytes, 256–261 are special, so that every prompt can be read in a test by `decode`. As real
    tokenizers do, `encode` refuses text that UTF-8 cannot hold (a lone surrogate).

    Args:
        keeps_thinking: whether the thinking of earlier turns stays in later prompts.
    """

    vocab_size = 262

    def __init__(self, *, keeps_thinking: bool = True) -> None:
        self.stop: tuple[str, ...] | tuple[int, ...] = (END,)
        self.keeps_thinking = keeps_thinking

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:  # noqa: D102  inherited
        parts: list[Tokens] = [_special(BEGIN)]
        if tools:
            parts += self._written("system", f"Tools:\n{json.dumps(list(tools))}")
        for message in messages:
            parts += self._written(message["role"], self._body(message))
        return as_prompt(np.concatenate([*parts, _special(ROLES["assistant"])]))

    def parse(self, completion: Tokens) -> Parsed:  # noqa: D102  inherited
        return parse_text(self.decode(completion))

    def encode(self, text: str) -> Tokens:  # noqa: D102  inherited
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def decode(self, tokens: Tokens) -> str:  # noqa: D102  inherited
        plain = tokens[np.asarray(tokens, np.int32).view(np.uint32) < BEGIN]  # one below 0 is a large one there
        return plain.astype(np.uint8).tobytes().decode(errors="replace")

    def _written(self, role: str, body: str) -> list[Tokens]:
        return [_special(ROLES[role]), self.encode(body), _special(END), self.encode("\n")]

    def _body(self, message: Message) -> str:
        thinking = message.get("thinking") if self.keeps_thinking else None
        head = "" if thinking is None else f"<think>\n{thinking}\n</think>\n\n"
        return "\n".join([head + _plain(message), *map(_call_text, message.get("tool_calls", []))])


def _special(token: int) -> Tokens:
    return np.array([token], dtype=np.int32)


def _plain(message: Message) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content if part["type"] == "text"]
    if len(texts) < len(content):
        raise UsageError("ByteChat writes text only: a message holds an image")
    return "".join(texts)


def _call_text(call: ToolCall) -> str:
    written: Json = {"name": call["name"], "arguments": call["arguments"]}
    return f"<tool_call>\n{json.dumps(written)}\n</tool_call>"


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One request that a sampler was given."""

    prompt: Prompt
    sampling: Sampling
    seed: int


class Author(Protocol):
    """Writes a reply, given the prompt's text and the request's seed."""

    def __call__(self, prompt: str, /, *, seed: int) -> str: ...  # noqa: D102  the class says it


class ScriptedSampler(Sampler):
    """A sampler whose completions are written by a function.

    A reply ends at the first stop token or string that it holds, or has one added; `max_tokens` cuts it off. `asked`
    keeps every request in order.
    """

    def __init__(self, author: Author, *, chat: ChatFormat, version: int = 0) -> None:
        self.asked: list[Asked] = []
        self._author = author
        self._chat = chat
        self._version = version

    @property
    def version(self) -> int:  # noqa: D102  inherited
        return self._version

    async def sample(  # noqa: D102  inherited
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        self.asked.append(Asked(prompt, sampling, seed))
        text = self._chat.decode(prompt.tokens)
        completions = [self._completion(self._author(text, seed=seed + n), sampling) for n in range(num_samples)]
        await asyncio.sleep(0)  # as with a real service, other rollouts go on meanwhile
        return completions

    def _completion(self, reply: str, sampling: Sampling) -> Completion:
        stop = self._chat.stop if sampling.stop is None else sampling.stop
        whole = self._stopped(reply, stop)
        tokens = whole[: sampling.max_tokens]
        reason: StopReason = "stop" if len(tokens) == len(whole) else "length"
        return Completion(tokens, np.full(len(tokens), LOGPROB, dtype=np.float32), reason)

    def _stopped(self, reply: str, stop: tuple[str, ...] | tuple[int, ...]) -> Tokens:
        strings = [s for s in stop if isinstance(s, str)]
        if strings:
            ends = [reply.find(s) + len(s) for s in strings if s in reply]
            return self._chat.encode(reply[: min(ends)] if ends else reply + strings[0])
        tokens, ids = self._chat.encode(reply), [s for s in stop if isinstance(s, int)]
        found = np.flatnonzero(np.isin(tokens, ids))
        return tokens[: found[0] + 1] if len(found) else np.append(tokens, np.array(ids[:1], dtype=np.int32))


class _AuthoredPolicy(RecordingPolicy):
    """A recording policy over one `ScriptedSampler`, with what tests want to see of it."""

    def __init__(
        self, author: Author, *, chat: ChatFormat | None, max_tokens: int, limits: Limits, seed: int, version: int = 0
    ) -> None:
        self.chat_format = chat or ByteChat()
        self.sampler = ScriptedSampler(author, chat=self.chat_format, version=version)
        super().__init__(
            sampler=lambda: self.sampler,
            chat=self.chat_format,
            sampling=Sampling(max_tokens=max_tokens),
            seed=lambda turn: seed + turn,
            limits=limits,
        )

    @property
    def prompts(self) -> tuple[str, ...]:
        """The text of each prompt that was sampled from, special tokens left out."""
        return tuple(self.chat_format.decode(asked.prompt.tokens) for asked in self.sampler.asked)


class ScriptedPolicy(_AuthoredPolicy):
    """A policy that says what it is told to say.

    Args:
        replies: the model's raw replies in order, thinking and tool calls included; or a function from the prompt's
            text to the reply.
        chat: the format; `ByteChat()` unless given.
        max_tokens: longer replies are cut off, as a run's setting would.
        limits: turns and context, as a run's setting would.

    Raises:
        AssertionError: the environment asked for more replies than there are.
    """

    def __init__(
        self,
        replies: Sequence[str] | Callable[[str], str],
        *,
        chat: ChatFormat | None = None,
        max_tokens: int = MAX_TOKENS,
        limits: Limits = UNLIMITED,
        version: int = 0,
    ) -> None:
        author = _calling(replies) if callable(replies) else _reading(replies)
        super().__init__(author, chat=chat, max_tokens=max_tokens, limits=limits, seed=0, version=version)


class NoisyPolicy(_AuthoredPolicy):
    """A policy that says anything: seeded text out of words, numbers, markup, broken JSON and odd characters.

    Args:
        seed: the same seed gives the same replies to the same requests.
        chat: the format; `ByteChat()` unless given.
        max_tokens: longer replies are cut off.
        limits: 32 turns unless given, so that an environment that waits for a good reply comes to an end.
    """

    def __init__(
        self, seed: int, *, chat: ChatFormat | None = None, max_tokens: int = 400, limits: Limits = PATIENCE
    ) -> None:
        super().__init__(_noise, chat=chat, max_tokens=max_tokens, limits=limits, seed=seed * 1000)


def _calling(function: Callable[[str], str]) -> Author:
    def author(prompt: str, *, seed: int) -> str:
        return function(prompt)

    return author


def _reading(replies: Sequence[str]) -> Author:
    script = [replies] if isinstance(replies, str) else replies
    unread = iter(script)

    def author(prompt: str, *, seed: int) -> str:
        for reply in unread:
            return reply
        raise AssertionError(
            f"the script has {len(script)} replies and the environment asks for one more: …{prompt[-200:]!r}"
        )

    return author


PIECES = (
    "yes", "The answer is", "a", "\n", "\n\n", " ", "\t", ".", "0", "-1", "3.14", "1e999", "nan", "½", "x^2", "$",
    "\\frac{1}{2}", "\\boxed{", "}", "{", "[", "]", '"', "'", ":", ",", "null", '{"name": ', '"arguments": {}',
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", "```python\n", "```",
    "é", "日本", "🙂", "\u200b", "\u202e", "\x00", "\x1b[31m", "\ufffd",
)  # fmt: skip
"""What noise is made of: words, numbers, notation that graders look for, and characters that few expect."""


def _noise(prompt: str, *, seed: int) -> str:
    chance = random.Random(seed)
    return "".join(chance.choice(PIECES) for _ in range(chance.randrange(40)))
