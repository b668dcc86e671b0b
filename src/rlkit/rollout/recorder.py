"""The policy handle of a rollout, which records every token.

Invariant: every completion is recorded as sampled before the rollout receives it, and training data is made from the
record alone. A token that was not sampled is marked and has no log-probability; an opponent's token is marked, too.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import cast, override

import numpy as np

from rlkit._util.json_values import render_value
from rlkit._util.seeds import derive_seed
from rlkit._util.threads import BlockingCalls
from rlkit.chat.demonstration import choose_trained, split_conversation
from rlkit.chat.format import ChatFormat
from rlkit.errors import ContextFull, EnvironmentFault, LimitReached, UsageError
from rlkit.policy import ChatRequest, Limits, OpponentSamplers, Policy, Sampler, SampleRequest
from rlkit.rollout.segments import Segment, Segments
from rlkit.rollout.validation import as_float
from rlkit.token_records.messages import new_messages
from rlkit.types import Bools, Completion, Floats, Message, Prompt, Reply, Sampling, Tokens, Tool, Turn, as_prompt

INLINE_CHARS = 200_000  # limit of a text tokenised on the event loop, in at most 0.1 s; a thread tokenises longer texts
_TOKEN_CHARS = 512  # upper bound of the length of a token; the longest tokens in use are runs of 128 spaces
_ONES = np.broadcast_to(np.True_, 2**40)  # masks of completions without forced tokens are views of one element
_in_tokenizer_thread = BlockingCalls(1, name="rlkit_tokenizing")  # so huge texts delay neither steps nor the journal

type _Piece = tuple[Tokens, Floats, Bools]
"""Tokens of a completion, their log-probabilities, and True for sampled tokens: [C] each."""


class RecordingPolicy(Policy):
    """The policy of one episode, which records its turns and keeps conversations token-exact.

    A prompt that continues the tokens of a segment becomes its next turn. A rollout may have several conversations and
    concurrent requests; each conversation extends its own segment, and may fork at any of its replies.

    Args:
        sampler: returns the sampler of a turn, so long rollouts can change to newer weights.
        sampling: the run's settings for this environment.
        seed: returns the seed of turn n.
        first_sampler: replaces `sampler` for the first turn.
        opponents: returns the samplers of opponents; None if there are none.
        is_supervised: the rollout records conversations, and samples nothing.
    """

    def __init__(
        self,
        *,
        sampler: Callable[[], Sampler],
        chat: ChatFormat,
        sampling: Sampling,
        seed: Callable[[int], int],
        limits: Limits = Limits(),
        first_sampler: Callable[[], Sampler] | None = None,
        opponents: OpponentSamplers | None = None,
        is_supervised: bool = False,
    ) -> None:
        super().__init__(sampling=sampling, limits=limits)
        self._opponents, self._has_opponents = opponents, opponents is not None
        self._is_supervised = is_supervised
        self._sampler = sampler
        self._first_sampler = first_sampler or sampler
        self._chat = chat
        self._seed = seed
        self._segments = Segments(chat, self._turns)
        self._requests = 0

    @override
    async def _respond(self, request: SampleRequest | ChatRequest) -> Reply:
        if self._is_supervised:
            raise EnvironmentFault("the environment demonstrations trains on conversations, and samples no reply")
        if isinstance(request, ChatRequest):
            return await self._respond_to_chat(request)
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = await self._tokenize(self._context(request), len(prompt), self._chat.encode, prompt)
        sampling = self._merge_settings(request.max_tokens, request.temperature, request.stop)
        segment = await self._complete(as_prompt(prompt), sampling, request)
        text = self._chat.decode(segment.turn.completion)
        return Reply(text, {"role": "assistant", "content": text}, segment.turn, segment.tokens)

    async def _respond_to_chat(self, request: ChatRequest) -> Reply:
        messages, tools = request.messages, request.tools
        if not messages:
            raise ValueError("chat needs at least one message")
        sampling = self._merge_settings(request.max_tokens, request.temperature, None)
        if sampling.stop is None:
            sampling = replace(sampling, stop=self._chat.stop)
        if request.stop and all(isinstance(stop, str) for stop in sampling.stop or ()):
            sampling = replace(sampling, stop=(*(sampling.stop or ()), *request.stop))  # services take only one kind
        earlier, prompt, is_rendered = await self._render(messages, tools, self._context(request))
        segment = await self._complete(prompt, sampling, request, earlier)
        parsed = self._chat.parse(segment.turn.completion)
        content = parsed.message["content"]
        text = content if isinstance(content, str) else ""
        stop_text: str | None = None
        for stop in request.stop:
            text, match, _ = text.partition(stop)
            parsed.message["content"], stop_text = text, match or stop_text
        # Copies, so that an edit of a message in place counts as a rewritten conversation.
        before = () if earlier is None else earlier.messages
        segment.messages = [*before, *deepcopy([*messages[len(before) :], parsed.message])]
        segment.turn = replace(segment.turn, messages=new_messages(segment.messages, segment.turn, self._turns))
        self._turns[segment.index] = segment.turn
        segment.tools, segment.is_rendered = deepcopy(list(tools)), is_rendered
        replies = earlier.replies if earlier is not None and segment.turn.parent == earlier.index else ()
        segment.replies = (*replies, (segment.index, len(segment.messages)))
        return Reply(text, parsed.message, segment.turn, segment.tokens, parsed.malformed_tool_calls, stop_text)

    @override
    async def count_tokens(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> int:
        _, prompt, _ = await self._render(messages, tools, self._limits.context_tokens)
        return len(prompt)

    async def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], context: int | None
    ) -> tuple[Segment | None, Prompt, bool]:
        """Return the segment that a conversation continues, its prompt, and whether that may equal the rendering."""
        earlier, chars = self._segments.find(messages, tools), _count_chars([*messages, *tools])
        return earlier, *await self._tokenize(context, chars, self._segments.render, earlier, messages, tools)

    @override
    def demonstrate(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), trained: Sequence[int] | None = None
    ) -> None:
        trained = choose_trained(messages) if trained is None else trained
        if len(set(trained)) < len(trained) or not set(trained) <= set(range(len(messages))):
            raise EnvironmentFault(f"demonstrate(): trained={trained!r}: give different indices of the messages")
        version, context = self._require_supervised(), self._limits.context_tokens
        for index, prompt, tokens in split_conversation(self._chat, messages, tools, trained):
            if context is not None and len(prompt) + len(tokens) > context:
                length = len(prompt) + len(tokens)
                raise EnvironmentFault(f"a conversation of {length} tokens does not fit the context of {context}")
            ones, unknown = np.ones(len(tokens), np.bool_), np.full(len(tokens), np.nan, np.float32)
            weight = messages[index].get("weight")
            turn = self._segments.add(Turn(prompt, tokens, unknown, ones, "stop", version, reward=weight)).turn
            self._turns[-1] = replace(turn, messages=new_messages(messages[: index + 1], turn, self._turns))

    @override
    def replay(self, turns: Sequence[Turn]) -> None:
        version = self._require_supervised()
        self._turns += [replace(turn, version=version, reward=None) for turn in turns]

    def _require_supervised(self) -> int:
        """Return the version of the weights; raise EnvironmentFault where the loss would be that of samples."""
        if not self._is_supervised:
            raise EnvironmentFault("demonstrate(): only `env: demonstrations` of `envs` trains on conversations")
        return self._sampler().version

    @override
    def _reward_turn(self, value: float, role: str | None) -> None:
        turns, places = self._turns, reversed(range(len(self._turns)))
        place = next((place for place in places if turns[place].role == role and not turns[place].frozen), None)
        if place is None:
            raise ValueError("reward() needs a turn: call sample or chat first")
        if (number := as_float(value)) is None or not math.isfinite(number):
            raise ValueError(f"the reward of a turn must be a finite number, not {render_value(value)}")
        turns[place] = replace(turns[place], reward=number + (turns[place].reward or 0.0))

    def _merge_settings(
        self, max_tokens: int | None, temperature: float | None, stop: Sequence[str] | Sequence[int] | None
    ) -> Sampling:
        run = self._sampling
        if max_tokens is temperature is stop is None:  # usually
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
        """Return the limit of prompt and completion together, in tokens; None for no limit."""
        limits = self._limits.context_tokens, request.context_tokens if isinstance(request, ChatRequest) else None
        return min([limit for limit in limits if limit is not None], default=None)

    async def _tokenize[*Ts, T](self, context: int | None, chars: int, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function that tokenises a text, in a thread if it is long; raise ContextFull if it cannot fit."""
        if context is not None and chars > context * _TOKEN_CHARS:
            raise ContextFull(f"a prompt of {chars:,} characters does not fit a context of {context} tokens")
        return function(*args) if chars <= INLINE_CHARS else await _in_tokenizer_thread(function, *args)

    async def _complete(
        self, prompt: Prompt, sampling: Sampling, request: SampleRequest | ChatRequest, earlier: Segment | None = None
    ) -> Segment:
        """Sample a completion, record it as a turn, and return the segment that it ends."""
        model_input, pieces = prompt, list[_Piece]()
        if len(request.forced):
            prefix = as_prompt(self._chat.encode(request.forced) if isinstance(request.forced, str) else request.forced)
            model_input, pieces = prompt + prefix, [_forced_piece(prefix.tokens)]
        context = self._context(request)
        min_reply_tokens = request.min_reply_tokens if isinstance(request, ChatRequest) else 1
        sampling = self._admit(model_input, sampling, context, min_reply_tokens)
        seed = self._seed(self._requests)
        make_sampler = self._sampler if self._requests else self._first_sampler
        self._requests += 1
        clock = asyncio.get_running_loop().time
        started_s = clock()
        forcing = sampling.forcing if isinstance(request, ChatRequest) else None
        try:
            if request.opponent is not None and self._opponents is not None:
                sampler = await self._opponents(request.opponent, self._sampler)
            else:
                sampler = make_sampler()
            (completion,) = await sampler.sample(model_input, sampling, seed=seed)
            completion = self._cut(completion, request)
            pieces.append(_sampled_piece(completion))
            if forcing is not None and completion.stop == "length":
                phrase = self._chat.close_thinking(model_input, completion.tokens, forcing.phrase)
                thought = model_input + as_prompt(np.concatenate([completion.tokens, phrase]))
                limit = forcing.context_tokens if context is None else min(forcing.context_tokens, context)
                room = limit - len(thought) - forcing.spare_tokens
                if room > 0:  # with the same weights and a separate random stream
                    answering = replace(sampling, max_tokens=room)
                    (completion,) = await sampler.sample(thought, answering, seed=derive_seed(seed, "answer"))
                    pieces += [_forced_piece(phrase), _sampled_piece(self._cut(completion, request))]
        except UsageError as error:  # the fault of this rollout's request must not end the run
            raise EnvironmentFault(str(error)) from error
        tokens, logprobs, sampled = _join_pieces(pieces)
        turn = Turn(
            prompt=prompt,
            completion=tokens,
            logprobs=logprobs,
            sampled_mask=sampled if request.opponent is None else np.zeros(len(tokens), np.bool_),
            stop=completion.stop,
            version=sampler.version,
            seconds=clock() - started_s,
            request_id=completion.request_id,
            role=request.role,
            frozen=request.opponent is not None,
        )
        return self._segments.add(turn, earlier=earlier)

    def _cut(self, completion: Completion, request: SampleRequest | ChatRequest) -> Completion:
        """Return a completion up to the token that completes a stop string of a chat, as if it had ended there."""
        if not isinstance(request, ChatRequest) or not request.stop:
            return completion
        tokens, strings = completion.tokens, request.stop

        def has_stop(count: int) -> bool:
            text = self._chat.decode(tokens[:count])
            return any(stop in text for stop in strings)

        if not has_stop(len(tokens)):
            return completion
        count = bisect_left(range(len(tokens)), True, key=has_stop)
        return replace(completion, tokens=tokens[:count], logprobs=completion.logprobs[:count], stop="stop")

    def _admit(self, prompt: Prompt, sampling: Sampling, context: int | None, min_reply_tokens: int) -> Sampling:
        """Check a request, and return its settings with `max_tokens` limited to the rest of the context."""
        if not len(prompt):
            raise ValueError("the prompt is empty: give at least one token")
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens={sampling.max_tokens}: it must be at least 1")
        if not 0 <= sampling.temperature < math.inf:
            raise ValueError(f"temperature={sampling.temperature}: it must be 0 or above, and finite")
        if (max_turns := self._limits.max_turns) is not None and self._requests >= max_turns:
            raise LimitReached(f"the rollout has had its {max_turns} turns (max_turns)")
        if context is None:
            return sampling
        room = context - len(prompt)
        if room < 1:
            raise ContextFull(f"a prompt of {len(prompt)} tokens fills the context of {context}")
        if room < min_reply_tokens:
            rest = f"{room} of {context}, and a reply needs {min_reply_tokens}"
            raise ContextFull(f"a prompt of {len(prompt)} tokens leaves {rest}")
        return sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room)


def _forced_piece(tokens: Tokens) -> _Piece:
    return tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.bool_)


def _sampled_piece(completion: Completion) -> _Piece:
    return completion.tokens, completion.logprobs, _ONES[: len(completion.tokens)]


def _join_pieces(pieces: Sequence[_Piece]) -> _Piece:
    if len(pieces) == 1:
        return pieces[0]
    tokens, logprobs, sampled = zip(*pieces, strict=True)
    return np.concatenate(tokens), np.concatenate(logprobs), np.concatenate(sampled)


def _count_chars(value: object) -> int:
    """Count the characters of all texts in messages and tools, and other values as one; they may have any shape."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = [item for pair in cast("Mapping[object, object]", value).items() for item in pair]
    return 1 + sum(map(_count_chars, cast("list[object]", value))) if isinstance(value, list | tuple) else 1
