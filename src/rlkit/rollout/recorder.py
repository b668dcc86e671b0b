"""The record of a rollout, made by the handle that it samples through.

Invariant: every completion that a rollout is given is recorded, as sampled, before the rollout sees it; the record is
the only source of training data. A token that was not sampled has no log-probability, and is marked.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import cast, override

import numpy as np

from rlkit._util.json_values import render_value
from rlkit._util.seeds import derive_seed
from rlkit._util.threads import DaemonThreadPool
from rlkit.chat.format import ChatFormat, extend
from rlkit.errors import ContextFull, EnvironmentFault, LimitReached, UsageError
from rlkit.policy import ChatRequest, Limits, Policy, Reply, Sampler, SampleRequest
from rlkit.rollout.validation import real
from rlkit.types import Bools, Completion, Floats, Message, Prompt, Sampling, Tokens, Tool, Turn, as_prompt

INLINE_CHARS = 200_000
"""Longest prompt that is tokenised on the event loop, in up to a tenth of a second; a thread takes a longer one."""

_TOKEN_CHARS = 512
"""No vocabulary has a longer token: the longest are runs of 128 spaces."""

type _Piece = tuple[Tokens, Floats, Bools]
"""Tokens of a completion, their log-probabilities, and whether they were sampled: [C] each."""


@dataclass(slots=True, eq=False)
class _Tip:
    """The end of a segment: its last turn, and all tokens up to there.

    Args:
        index: position of the turn in the record.
        messages: the conversation that the tokens stand for; none after `sample`.
        plain: the prompt may be what the format renders for the conversation.
    """

    index: int
    turn: Turn
    tokens: Prompt
    messages: list[Message] = field(default_factory=list[Message])
    tools: list[Tool] = field(default_factory=list[Tool])
    plain: bool = True


class RecordingPolicy(Policy):
    """The policy handle of one episode: samples, records, and keeps conversations token-exact.

    A prompt that continues the tokens of a segment becomes the next turn of that segment. A rollout may hold several
    conversations at once, and ask for completions concurrently; each extends its own segment.

    Args:
        sampler: called for each turn, so that long rollouts can move to newer weights.
        chat: the model's format.
        sampling: the run's settings for this environment.
        seed: called with the turn's number; the same episode asks for the same seeds.
        limits: what the rollout may use.
        first: called instead of `sampler` for the first turn.
    """

    def __init__(
        self,
        *,
        sampler: Callable[[], Sampler],
        chat: ChatFormat,
        sampling: Sampling,
        seed: Callable[[int], int],
        limits: Limits = Limits(),
        first: Callable[[], Sampler] | None = None,
    ) -> None:
        super().__init__(sampling=sampling, limits=limits)
        self._sampler = sampler
        self._first = first or sampler
        self._chat = chat
        self._seed = seed
        self._tips: list[_Tip] = []
        self._asked = 0

    @override
    async def _respond(self, request: SampleRequest | ChatRequest) -> Reply:
        if isinstance(request, ChatRequest):
            return await self._respond_to_chat(request)
        prompt = request.prompt
        if isinstance(prompt, str):
            self._refuse_giant(len(prompt), request)
            prompt = await _tokenized(len(prompt), self._chat.encode, prompt)
        sampling = self._settings(request.max_tokens, request.temperature, request.stop)
        tip = await self._complete(as_prompt(prompt), sampling, request)
        text = self._chat.decode(tip.turn.completion)
        return Reply(text, {"role": "assistant", "content": text}, tip.turn, tip.tokens)

    async def _respond_to_chat(self, request: ChatRequest) -> Reply:
        messages, tools = request.messages, request.tools
        if not messages:
            raise ValueError("chat needs at least one message")
        sampling = self._settings(request.max_tokens, request.temperature, None)
        if sampling.stop is None:
            sampling = replace(sampling, stop=self._chat.stop)
        size = _chars(list(messages))
        self._refuse_giant(size, request)
        continued = self._continued(messages, tools)
        prompt, plain = await _tokenized(size, self._prompt, continued, messages, tools)
        tip = await self._complete(prompt, sampling, request)
        parsed = self._chat.parse(tip.turn.completion)
        # Copies, so that a rollout that edits a message in place is seen to have rewritten the conversation.
        known = [] if continued is None else continued.messages
        tip.messages = [*known, *deepcopy([*messages[len(known) :], parsed.message])]
        tip.tools, tip.plain = deepcopy(list(tools)), plain
        text = parsed.message["content"]
        return Reply(text if isinstance(text, str) else "", parsed.message, tip.turn, tip.tokens, parsed.malformed)

    @override
    def reward(self, value: float) -> None:
        if not self._turns:
            raise ValueError("reward() needs a turn to give the reward to: sample or chat first")
        number = real(value)
        if number is None:
            raise ValueError(f"a turn was given the reward {render_value(value)}; rewards are numbers")
        if not math.isfinite(number):
            raise ValueError(f"a turn was given the reward {number}; rewards must be finite")
        last = self._turns[-1]
        self._turns[-1] = replace(last, reward=number + (last.reward or 0.0))

    def _settings(
        self, max_tokens: int | None, temperature: float | None, stop: Sequence[str] | Sequence[int] | None
    ) -> Sampling:
        run = self._sampling
        if max_tokens is None and temperature is None and stop is None:
            return run
        if isinstance(stop, str):
            stop = (stop,)
        return replace(
            run,
            max_tokens=run.max_tokens if max_tokens is None else min(max_tokens, run.max_tokens),
            temperature=run.temperature if temperature is None else temperature,
            stop=run.stop if stop is None else tuple(stop),  # pyright: ignore[reportArgumentType]  one kind in, one kind out
        )

    def _context(self, request: SampleRequest | ChatRequest) -> int | None:
        """Return the tokens that prompt and completion may have together; None without a limit."""
        limit = self._limits.context_tokens
        if not isinstance(request, ChatRequest) or request.context_tokens is None:
            return limit
        return request.context_tokens if limit is None else min(limit, request.context_tokens)

    def _refuse_giant(self, chars: int, request: SampleRequest | ChatRequest) -> None:
        """Refuse a text that cannot fit, however long its tokens are, before it is tokenised.

        Raises:
            ContextFull: the text does not fit.
        """
        context = self._context(request)
        if context is not None and chars > context * _TOKEN_CHARS:
            raise ContextFull(f"a prompt of {chars:,} characters does not fit a context of {context} tokens")

    def _prompt(self, tip: _Tip | None, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Prompt, bool]:
        """Return the prompt for a conversation, and whether it may be what the format renders for it.

        Args:
            tip: the end of the segment that the conversation continues; None for a new one.
            messages: the whole conversation.
            tools: functions that the model may call.
        """
        if tip is None:
            return self._chat.render(messages, tools), True
        # Where it is known what follows the reply, the whole conversation need not be tokenised again to see it.
        dropped = not self._chat.keeps_thinking and any("thinking" in message for message in tip.messages)
        rendered = None
        if tip.plain and (dropped or tip.turn.stop == "length"):
            rendered = self._chat.render(messages, tools)
            if len(rendered) > len(tip.tokens) and rendered.starts_with(tip.tokens):
                return rendered, True
        replied = len(tip.messages) - 1
        extended = extend(self._chat, tip.tokens, tip.turn, messages, replied=replied, tools=tools)
        if extended is not None:
            return extended, tip.plain and rendered is None
        return self._chat.render(messages, tools) if rendered is None else rendered, True

    def _continued(self, messages: Sequence[Message], tools: Sequence[Tool]) -> _Tip | None:
        for tip in reversed(self._tips):
            count = len(tip.messages)
            if count and len(messages) > count and list(messages[:count]) == tip.messages and list(tools) == tip.tools:
                return tip
        return None

    async def _complete(self, prompt: Prompt, sampling: Sampling, request: SampleRequest | ChatRequest) -> _Tip:
        """Sample a completion and record it as a turn, the new end of its segment."""
        given, pieces = prompt, list[_Piece]()
        if len(request.forced):
            forced = self._chat.encode(request.forced) if isinstance(request.forced, str) else request.forced
            prefix = as_prompt(forced)
            given, pieces = prompt + prefix, [_forced(prefix.tokens)]
        context = self._context(request)
        sampling = self._admit(given, sampling, context, request.room if isinstance(request, ChatRequest) else 1)
        seed = self._seed(self._asked)
        sampler = self._sampler() if self._asked else self._first()
        self._asked += 1
        clock = asyncio.get_running_loop().time
        started = clock()
        forcing = sampling.forcing if isinstance(request, ChatRequest) else None
        try:
            (completion,) = await sampler.sample(given, sampling, seed=seed)
            pieces.append(_sampled(completion))
            if forcing is not None and completion.stop == "length":
                last_words = self._chat.last_words(given, completion.tokens, forcing.phrase)
                thought = given + as_prompt(np.concatenate([completion.tokens, last_words]))
                limit = forcing.context_tokens if context is None else min(forcing.context_tokens, context)
                left = limit - len(thought) - forcing.spare_tokens
                if left > 0:  # the same weights, and a stream of random numbers of its own
                    answering = replace(sampling, max_tokens=left)
                    (completion,) = await sampler.sample(thought, answering, seed=derive_seed(seed, "answer"))
                    pieces += [_forced(last_words), _sampled(completion)]
        except UsageError as error:  # what was asked for is this rollout's own, and no reason to end the run
            raise EnvironmentFault(str(error)) from error
        parent = self._parent(prompt)
        tokens, logprobs, sampled = _joined(pieces)
        turn = Turn(
            prompt=prompt if parent is None else prompt.after(len(parent.tokens)),
            completion=tokens,
            logprobs=logprobs,
            sampled=sampled,
            stop=completion.stop,
            version=sampler.version,
            parent=None if parent is None else parent.index,
            seconds=clock() - started,
            request_id=completion.request_id,
        )
        self._turns.append(turn)
        if parent is not None:
            self._tips.remove(parent)
        self._tips.append(_Tip(len(self._turns) - 1, turn, prompt + as_prompt(tokens)))
        return self._tips[-1]

    def _admit(self, given: Prompt, sampling: Sampling, context: int | None, needed: int) -> Sampling:
        """Return the settings of an allowed request, with the tokens that the context has left.

        Raises:
            ValueError: the prompt is empty, or a setting makes no sense.
            LimitReached: the turns or the context are used up.
        """
        if not len(given):
            raise ValueError("a completion of an empty prompt was asked for: give at least one token")
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens={sampling.max_tokens} was asked for: it must be at least 1")
        if not 0 <= sampling.temperature < math.inf:
            raise ValueError(f"temperature={sampling.temperature} was asked for: it must be 0 or above")
        most = self._limits.max_turns
        if most is not None and self._asked >= most:
            raise LimitReached(f"the rollout has had its {most} turns (max_turns)")
        if context is None:
            return sampling
        room = context - len(given)
        if room < 1:
            raise ContextFull(f"a prompt of {len(given)} tokens fills the context of {context}")
        if room < needed:
            raise ContextFull(f"a prompt of {len(given)} tokens leaves {room} of {context}, and a reply needs {needed}")
        return sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room)

    def _parent(self, prompt: Prompt) -> _Tip | None:
        fitting = [tip for tip in self._tips if prompt.starts_with(tip.tokens)]
        return max(fitting, key=lambda tip: len(tip.tokens), default=None)


def _forced(tokens: Tokens) -> _Piece:
    return tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.bool_)


def _sampled(completion: Completion) -> _Piece:
    count = len(completion.tokens)
    return completion.tokens, completion.logprobs, _ones(count.bit_length())[:count]


@cache
def _ones(bits: int) -> Bools:
    """Return 2^bits ones, which all completions share: nearly every token is sampled."""
    ones = np.ones(1 << bits, np.bool_)
    ones.flags.writeable = False
    return ones


def _joined(pieces: Sequence[_Piece]) -> _Piece:
    if len(pieces) == 1:
        return pieces[0]
    tokens, logprobs, sampled = zip(*pieces, strict=True)
    return np.concatenate(tokens), np.concatenate(logprobs), np.concatenate(sampled)


def _chars(value: object) -> int:
    """Count the characters of texts in messages of any shape: the chat format says what is wrong with one."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_chars(inner) for inner in cast("Mapping[object, object]", value).values())
    if isinstance(value, list | tuple):
        return sum(_chars(inner) for inner in cast("list[object]", value))
    return 0


async def _tokenized[*Ts, T](chars: int, function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call a function that tokenises so many characters: here if they are few, and otherwise in a thread."""
    if chars <= INLINE_CHARS:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_tokenizing(), function, *args)


@cache
def _tokenizing() -> DaemonThreadPool:
    """Return a thread for tokenising alone, so that endless texts hold up neither steps nor the journal."""
    return DaemonThreadPool(1, name="rlkit_tokenizing")


os.register_at_fork(after_in_child=_tokenizing.cache_clear)  # a forked process has the object, and no thread
