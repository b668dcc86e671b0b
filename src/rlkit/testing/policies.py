"""Policies without a model, for exact offline tests of environments.

    policy = rlkit.testing.ScriptedPolicy(["olleh"])
    assert await Reverse("hello").rollout(policy) == 1.0

Invariant: only the sampler is scripted. `RecordingPolicy` records turns, enforces limits and extends the tokens of a
conversation, as in a run.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlkit.chat.format import ChatFormat, ParsedReply, parse_text
from rlkit.errors import UsageError
from rlkit.policy import Limits, Sampler
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.types import (
    Completion,
    Json,
    Message,
    Prompt,
    Sampling,
    StopReason,
    TokenPiece,
    Tokens,
    Tool,
    as_prompt,
)

MAX_TOKENS = 1 << 20
"""Default of `max_tokens`: larger than any script, so that no reply is truncated by accident."""

LOGPROB = -1.0
"""Log-probability of each token of a scripted sampler."""

BEGIN, END = 256, 257
"""Tokens that open a conversation and close a message."""

ROLES: Mapping[str, int] = {"system": 258, "user": 259, "assistant": 260, "tool": 261}
"""Token that opens a message of each role."""


class ByteChat(ChatFormat):
    """Chat format over UTF-8 bytes, similar to ChatML: `BEGIN`, then `role text END newline` for each message.

    Tokens 0–255 are bytes, and 256–261 are special. `decode` omits special tokens. Like real tokenizers, `encode`
    rejects text that UTF-8 cannot encode (a lone surrogate).

    Args:
        keeps_thinking: keep the thinking of earlier turns in later prompts.
    """

    vocab_size = 262

    def __init__(self, *, keeps_thinking: bool = True) -> None:
        self.stop: tuple[str, ...] | tuple[int, ...] = (END,)
        self.keeps_thinking = keeps_thinking

    def render(  # noqa: D102  inherited
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, whole: bool = False
    ) -> Prompt:
        parts: list[Tokens] = [_special(BEGIN)]
        if tools:
            parts += self._render_message("system", f"Tools:\n{json.dumps(list(tools))}")
        for message in messages:
            parts += self._render_message(message["role"], self._render_body(message))
        return as_prompt(np.concatenate(parts if whole else [*parts, _special(ROLES["assistant"])]))

    def parse(self, completion: Tokens) -> ParsedReply:  # noqa: D102  inherited
        return parse_text(self.decode(completion))

    def encode(self, text: str) -> Tokens:  # noqa: D102  inherited
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def decode(self, tokens: Tokens) -> str:  # noqa: D102  inherited
        is_plain = np.asarray(tokens, np.int32).view(np.uint32) < BEGIN  # unsigned, a negative token is large
        plain = tokens if np.count_nonzero(is_plain) == len(tokens) else tokens[is_plain]
        return plain.astype(np.uint8).tobytes().decode(errors="replace")

    def piece(self, token: int) -> TokenPiece:  # noqa: D102  inherited
        names = {BEGIN: "<begin>", END: "<end>"} | {number: f"<{role}>" for role, number in ROLES.items()}
        return TokenPiece(names[token].encode(), True) if token in names else TokenPiece(bytes([token]), False)

    def _render_message(self, role: str, body: str) -> list[Tokens]:
        return [_special(ROLES[role]), self.encode(body), _special(END), self.encode("\n")]

    def _render_body(self, message: Message) -> str:
        thinking = message.get("thinking") if self.keeps_thinking else None
        head = "" if thinking is None else f"<think>\n{thinking}\n</think>\n\n"
        content = message["content"]
        if not isinstance(content, str):
            if any(part["type"] != "text" for part in content):
                raise UsageError("ByteChat renders text only, but a message has an image")
            content = "".join(part["text"] for part in content if part["type"] == "text")
        calls = [render_call(call["name"], call["arguments"]) for call in message.get("tool_calls", [])]
        return "\n".join([head + content, *calls])


def _special(token: int) -> Tokens:
    return np.array([token], dtype=np.int32)


def render_call(name: str, arguments: Json) -> str:
    """Return a tool call in the notation of most chat templates."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True, slots=True, eq=False)
class SamplerRequest:
    """Request to a sampler."""

    prompt: Prompt
    sampling: Sampling
    seed: int


class Author(Protocol):
    """Function that returns a reply, given the text of a prompt and the seed of the request."""

    def __call__(self, prompt: str, /, *, seed: int) -> str: ...  # noqa: D102  see the class


class ScriptedSampler:
    """Sampler whose completions come from a function.

    A reply ends at its first stop token or string, which is appended if it is missing. A reply longer than
    `max_tokens` is truncated. `requests` lists every request in order.
    """

    def __init__(self, author: Author, *, chat: ChatFormat, version: int = 0) -> None:
        self.requests: list[SamplerRequest] = []
        self.version = version
        self._author = author
        self._chat = chat

    async def sample(  # noqa: D102  see `Sampler`
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        self.requests.append(SamplerRequest(prompt, sampling, seed))
        text = self._chat.decode(prompt.tokens)
        completions = [self._completion(self._author(text, seed=seed + n), sampling) for n in range(num_samples)]
        await asyncio.sleep(0)  # lets other rollouts run, as a real service does
        return completions

    def _completion(self, reply: str, sampling: Sampling) -> Completion:
        stop = self._chat.stop if sampling.stop is None else sampling.stop
        full = self._encode_until_stop(reply, stop)
        tokens = full[: sampling.max_tokens]
        reason: StopReason = "stop" if len(tokens) == len(full) else "length"
        return Completion(tokens, np.full(len(tokens), LOGPROB, dtype=np.float32), reason)

    def _encode_until_stop(self, reply: str, stop: tuple[str, ...] | tuple[int, ...]) -> Tokens:
        strings = [s for s in stop if isinstance(s, str)]
        if strings:
            ends = [reply.find(s) + len(s) for s in strings if s in reply]
            return self._chat.encode(reply[: min(ends)] if ends else reply + strings[0])
        tokens, ids = self._chat.encode(reply), [s for s in stop if isinstance(s, int)]
        stops = np.flatnonzero(np.isin(tokens, ids))
        return tokens[: stops[0] + 1] if len(stops) else np.append(tokens, np.array(ids[:1], dtype=np.int32))


async def play_itself(weights: int | str, newest: Callable[[], Sampler]) -> Sampler:
    """Return the sampler of the newest weights for every opponent."""
    return newest()


class _AuthoredPolicy(RecordingPolicy):
    """Recording policy over one `ScriptedSampler`."""

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
            opponents=play_itself,
        )

    @property
    def prompts(self) -> tuple[str, ...]:
        """Text of each prompt, without special tokens."""
        return tuple(self.chat_format.decode(request.prompt.tokens) for request in self.sampler.requests)


class ScriptedPolicy(_AuthoredPolicy):
    """Policy with scripted replies.

    Args:
        replies: raw replies in order, with thinking and tool calls; or a function from the text of a prompt to a reply.
        chat: chat format; `ByteChat()` by default.
        max_tokens: maximum length of a reply; longer replies are truncated.
        limits: limits of turns and context.

    Raises:
        AssertionError: the environment requested more replies than the script has.
    """

    def __init__(
        self,
        replies: Sequence[str] | Callable[[str], str],
        *,
        chat: ChatFormat | None = None,
        max_tokens: int = MAX_TOKENS,
        limits: Limits = Limits(),
        version: int = 0,
    ) -> None:
        write = replies if callable(replies) else _make_writer(replies)

        def author(prompt: str, *, seed: int) -> str:
            return write(prompt)

        super().__init__(author, chat=chat, max_tokens=max_tokens, limits=limits, seed=0, version=version)


class NoisyPolicy(_AuthoredPolicy):
    """Policy with random replies: seeded words, numbers, markup, broken JSON and odd characters.

    Args:
        seed: seed of the replies; equal requests get equal replies.
        chat: chat format; `ByteChat()` by default.
        max_tokens: maximum length of a reply; longer replies are truncated.
        limits: limits of turns and context. The default of 32 turns ends environments that wait for a good reply.
    """

    def __init__(
        self, seed: int, *, chat: ChatFormat | None = None, max_tokens: int = 400, limits: Limits = Limits(max_turns=32)
    ) -> None:
        super().__init__(_write_noise, chat=chat, max_tokens=max_tokens, limits=limits, seed=seed * 1000)


def _make_writer(replies: Sequence[str]) -> Callable[[str], str]:
    script = [replies] if isinstance(replies, str) else replies
    unread = iter(script)

    def write(prompt: str) -> str:
        for reply in unread:
            return reply
        raise AssertionError(
            f"the script has {len(script)} replies and the environment requests one more: …{prompt[-200:]!r}"
        )

    return write


PIECES = (
    "yes", "The answer is", "a", "\n", "\n\n", " ", "\t", ".", "0", "-1", "3.14", "1e999", "nan", "½", "x^2", "$",
    "\\frac{1}{2}", "\\boxed{", "}", "{", "[", "]", '"', "'", ":", ",", "null", '{"name": ', '"arguments": {}',
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", "```python\n", "```",
    "é", "日本", "🙂", "\u200b", "\u202e", "\x00", "\x1b[31m", "\ufffd",
)  # fmt: skip
"""Parts of random replies: words, numbers, notation that graders parse, and rare characters."""


def _write_noise(prompt: str, *, seed: int) -> str:
    chance = random.Random(seed)
    return "".join(chance.choice(PIECES) for _ in range(chance.randrange(40)))
