"""The record of a rollout, made by the handle that it samples through.

Invariant: every completion that a rollout is given is recorded, as sampled, before the rollout sees it; the record is
the only source of training data.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import cast

import numpy as np

from rlkit._util.json_values import shown
from rlkit._util.seeds import derive
from rlkit._util.threads import LooseThreads
from rlkit.chat.format import ChatFormat, extend
from rlkit.errors import ContextFull, EnvironmentFault, LimitReached, UsageError
from rlkit.policy import Limits, Policy, Reply, Sampler
from rlkit.rollout.recorder_pieces import forced_piece, joined, sampled_piece
from rlkit.rollout.validation import real
from rlkit.types import (
    BudgetForcing,
    Completion,
    Message,
    Prompt,
    Sampling,
    Tokens,
    Tool,
    Turn,
    as_prompt,
)

AT_ONCE_CHARS = 200_000
"""Of a prompt that is tokenised on the event loop, which takes up to a tenth of a second; a longer one, in a thread."""

_TOKEN_CHARS = 512
"""No vocabulary has a longer token: the longest are runs of 128 spaces."""


@dataclass(slots=True, eq=False)
class _Tip:
    """The end of a segment: its last turn, all its tokens, and the conversation that they stand for where it is one.

    Its prompt is `plain` where it may be what the format renders for that; what extends one that is not cannot be.
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
        self._sampler = sampler
        self._first = sampler if first is None else first
        self._chat = chat
        self._sampling = sampling
        self._seed = seed
        self._limits = limits
        self._turns: list[Turn] = []
        self._tips: list[_Tip] = []
        self._asked = 0

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

    async def sample(  # noqa: D102  inherited
        self,
        prompt: str | Prompt | Sequence[int] | Tokens,
        *,
        forced: str | Sequence[int] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] | Sequence[int] | None = None,
    ) -> Reply:
        if isinstance(prompt, str):
            self._refuse_giant(len(prompt), None)
            given = as_prompt(await _tokenized(len(prompt), self._chat.encode, prompt))
        else:
            given = as_prompt(prompt)
        sampling = self._settings(max_tokens, temperature, stop)
        tip = await self._complete(given, sampling, forced=forced)
        text = self._chat.decode(tip.turn.completion)
        return Reply(text, {"role": "assistant", "content": text}, tip.turn, tip.tokens)

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
        if not messages:
            raise ValueError("chat needs at least one message")
        sampling = self._settings(max_tokens, temperature, None)
        if sampling.stop is None:
            sampling = replace(sampling, stop=self._chat.stop)
        size = _chars(list(messages))
        self._refuse_giant(size, context_tokens)
        prompt, plain = await _tokenized(size, self._prompt, self._continued(messages, tools), messages, tools)
        tip = await self._complete(
            prompt, sampling, forced=forced, room=room, context_tokens=context_tokens, forcing=sampling.forcing
        )
        parsed = self._chat.parse(tip.turn.completion)
        # copies, so that a rollout that edits a message in place is seen to have rewritten the conversation
        tip.messages, tip.tools = deepcopy([*messages, parsed.message]), deepcopy(list(tools))
        tip.plain = plain
        text = parsed.message["content"]
        return Reply(text if isinstance(text, str) else "", parsed.message, tip.turn, tip.tokens, parsed.malformed)

    def reward(self, value: float) -> None:  # noqa: D102  inherited
        if not self._turns:
            raise ValueError("reward() needs a turn to give the reward to: sample or chat first")
        number = real(value)
        if number is None:
            raise ValueError(f"a turn was given the reward {shown(value)}; rewards are numbers")
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

    def _refuse_giant(self, chars: int, wanted: int | None) -> None:
        """Check that a text of so many characters may fit, before it is tokenised.

        Raises:
            ContextFull: it does not, however long its tokens are.
        """
        contexts = [context for context in (self._limits.context_tokens, wanted) if context is not None]
        if contexts and chars > min(contexts) * _TOKEN_CHARS:
            raise ContextFull(f"a prompt of {chars:,} characters does not fit a context of {min(contexts)} tokens")

    def _prompt(self, tip: _Tip | None, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Prompt, bool]:
        """The prompt for a conversation, and whether it may be what the format renders for it.

        Args:
            tip: the end of the segment that the conversation continues; None for a new one.
            messages: of the conversation.
            tools: that it may call.
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

    async def _complete(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        forced: str | Sequence[int],
        room: int = 1,
        context_tokens: int | None = None,
        forcing: BudgetForcing | None = None,
    ) -> _Tip:
        prefix = self._chat.encode(forced) if isinstance(forced, str) else np.asarray(forced, dtype=np.int32)
        given = prompt + as_prompt(prefix) if len(prefix) else prompt
        sampling = self._admit(given, sampling, room, context_tokens)
        seed = self._seed(self._asked)
        sampler = self._sampler() if self._asked else self._first()
        self._asked += 1
        clock = asyncio.get_running_loop().time
        started = clock()
        pieces = [forced_piece(prefix)] if len(prefix) else []
        try:
            (completion,) = await sampler.sample(given, sampling, seed=seed)
            pieces.append(sampled_piece(completion))
            if forcing is not None and completion.stop == "length":
                told = self._last_words(given, completion, forcing)
                whole = given + as_prompt(np.concatenate([completion.tokens, told]))
                left = self._left(whole, forcing, context_tokens)
                if left > 0:  # the same weights, and a stream of random numbers of its own
                    answering = replace(sampling, max_tokens=left)
                    (completion,) = await sampler.sample(whole, answering, seed=derive(seed, "answer"))
                    pieces += [forced_piece(told), sampled_piece(completion)]
        except UsageError as error:  # what was asked for is this rollout's own, and no reason to end the run
            raise EnvironmentFault(str(error)) from error
        parent = self._parent(prompt)
        tokens, logprobs, sampled = joined(pieces)
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
        tip = _Tip(len(self._turns) - 1, turn, prompt + as_prompt(tokens))
        self._tips.append(tip)
        return tip

    def _last_words(self, given: Prompt, completion: Completion, forcing: BudgetForcing) -> Tokens:
        return self._chat.last_words(given, completion.tokens, forcing.phrase)

    def _left(self, whole: Prompt, forcing: BudgetForcing, wanted: int | None) -> int:
        """Tokens that an answer to this may have."""
        limits = (forcing.context_tokens, self._limits.context_tokens, wanted)
        return min(limit for limit in limits if limit is not None) - len(whole) - forcing.spare_tokens

    def _admit(self, given: Prompt, sampling: Sampling, needed: int, wanted: int | None) -> Sampling:
        if not len(given):
            raise ValueError("a completion of an empty prompt was asked for: give at least one token")
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens={sampling.max_tokens} was asked for: it must be at least 1")
        if not 0 <= sampling.temperature < math.inf:
            raise ValueError(f"temperature={sampling.temperature} was asked for: it must be 0 or above")
        most = self._limits.max_turns
        if most is not None and self._asked >= most:
            raise LimitReached(f"the rollout has had its {most} turns (max_turns)")
        contexts = [context for context in (self._limits.context_tokens, wanted) if context is not None]
        if not contexts:
            return sampling
        context = min(contexts)
        room = context - len(given)
        if room < 1:
            raise ContextFull(f"a prompt of {len(given)} tokens fills the context of {context}")
        if room < needed:
            raise ContextFull(f"a prompt of {len(given)} tokens leaves {room} of {context}, and a reply needs {needed}")
        return sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room)

    def _parent(self, prompt: Prompt) -> _Tip | None:
        fitting = [tip for tip in self._tips if len(tip.tokens) <= len(prompt) and prompt.starts_with(tip.tokens)]
        return max(fitting, key=lambda tip: len(tip.tokens), default=None)


def _chars(value: object) -> int:
    """Characters of the texts in messages, whatever their shape: the chat format says what is wrong with it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_chars(inner) for inner in cast("Mapping[object, object]", value).values())
    if isinstance(value, list | tuple):
        return sum(_chars(inner) for inner in cast("list[object]", value))
    return 0


async def _tokenized[*Ts, T](chars: int, function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call a function that tokenises so many characters: here where they are few, and otherwise in a thread."""
    if chars <= AT_ONCE_CHARS:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_tokenizing(), function, *args)


@cache
def _tokenizing() -> LooseThreads:
    """A thread of its own: environments that tokenise for ever hold up neither each other's steps nor the journal."""
    return LooseThreads(1, name="rlkit_tokenizing")


os.register_at_fork(after_in_child=_tokenizing.cache_clear)  # a forked process has the object, and no thread
