from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.errors import ContextFull, LimitReached
from rlkit.policy import Limits
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.testing import ByteChat, ScriptedPolicy, ScriptedSampler
from rlkit.testing.policies import END
from rlkit.types import Message, Sampling, Tool, Turn

OPENING: list[Message] = [{"role": "user", "content": "Begin."}]
MORE: Message = {"role": "user", "content": "Go on."}
TOOL: Tool = {"name": "add", "description": "adds", "parameters": {}}


def whole(turns: Sequence[Turn], index: int) -> list[int]:
    """The full prompt of a turn, rebuilt from the record."""
    turn = turns[index]
    before = [] if turn.parent is None else [*whole(turns, turn.parent), *turns[turn.parent].completion.tolist()]
    return [*before, *turn.prompt.tokens.tolist()]


@dataclass(frozen=True)
class Move:
    """One request of a made-up rollout.

    Args:
        line: which conversation goes on; a new number begins one.
        user: the message before the reply.
        kept: whether the reply of the turn before is kept as it is.
    """

    line: int
    user: str
    reply: str
    max_tokens: int
    forced: str
    kept: bool
    tools: bool


moves = st.builds(
    Move,
    line=st.integers(0, 2),
    user=st.text(max_size=5),
    reply=st.text(max_size=8) | st.sampled_from(["<think>a</think>b", " b ", '<tool_call>{"name": "f"', "</think>"]),
    max_tokens=st.integers(1, 12),
    forced=st.sampled_from(["", "<think>", "é"]),
    kept=st.booleans(),
    tools=st.booleans(),
)


@given(st.lists(moves, max_size=8), st.booleans())
def test_the_record_rebuilds_the_exact_prompts_that_the_sampler_saw(script: list[Move], keeps_thinking: bool) -> None:
    policy = ScriptedPolicy([move.reply for move in script], chat=ByteChat(keeps_thinking=keeps_thinking))

    async def play() -> None:
        lines: dict[int, list[Message]] = {}
        for move in script:
            messages = [*lines.get(move.line, []), Message(role="user", content=move.user)]
            reply = await policy.chat(
                messages, tools=[TOOL] if move.tools else [], forced=move.forced, max_tokens=move.max_tokens
            )
            said = reply.message if move.kept else Message(role="assistant", content="I forgot.")
            lines[move.line] = [*messages, said]

    asyncio.run(play())
    turns, asked = policy.turns, policy.sampler.requests
    for index, move in enumerate(script):
        forced = list(move.forced.encode())
        assert [*whole(turns, index), *forced] == asked[index].prompt.tokens.tolist()
        assert turns[index].completion[: len(forced)].tolist() == forced
        assert turns[index].sampled_mask.tolist() == [n >= len(forced) for n in range(len(turns[index].completion))]
        parent = turns[index].parent
        assert parent is None or parent < index


def test_a_conversation_is_one_segment() -> None:
    policy = ScriptedPolicy(["one ", "\ntwo", "three"])

    async def play() -> None:
        messages = list(OPENING)
        for _ in range(3):
            messages += [(await policy.chat(messages, tools=[TOOL])).message, MORE]

    asyncio.run(play())
    assert [turn.parent for turn in policy.turns] == [None, 0, 1]


@pytest.mark.parametrize("change", ["text", "in place", "tools", "opening"])
def test_a_conversation_that_was_changed_starts_a_new_segment(change: str) -> None:
    policy = ScriptedPolicy(["one", "two"])

    async def play() -> None:
        opening = [Message(role="user", content="Begin.")]
        reply = await policy.chat(opening)
        said = reply.message
        match change:
            case "text":
                said = Message(role="assistant", content="uno")
            case "in place":
                said["content"] = "uno"
            case "opening":
                opening[0]["content"] = "Start."
            case _:
                pass
        await policy.chat([*opening, said, MORE], tools=[TOOL] if change == "tools" else [])

    asyncio.run(play())
    assert [turn.parent for turn in policy.turns] == [None, None]
    assert ("uno" in policy.prompts[1]) == (change in ("text", "in place"))


def test_conversations_at_once_extend_their_own_tokens() -> None:
    policy = ScriptedPolicy(lambda prompt: f"reply {len(prompt)} to {prompt.split()[0]}")

    async def talk(name: str) -> None:
        messages: list[Message] = [{"role": "user", "content": name}]
        for _ in range(3):
            messages += [(await policy.chat(messages)).message, MORE]

    async def play() -> None:
        await asyncio.gather(talk("Alice"), talk("Bob"))

    asyncio.run(play())
    turns = policy.turns
    assert sum(turn.parent is None for turn in turns) == 2
    rebuilt = sorted(whole(turns, index) for index in range(len(turns)))
    assert rebuilt == sorted(asked.prompt.tokens.tolist() for asked in policy.sampler.requests)


def test_of_two_continuations_of_one_reply_one_is_its_extension() -> None:
    policy = ScriptedPolicy(["one", "two", "three"])

    async def play() -> None:
        reply = await policy.chat(OPENING)
        messages = [*OPENING, reply.message, MORE]
        await asyncio.gather(policy.chat(messages), policy.chat(messages))

    asyncio.run(play())
    assert [turn.parent for turn in policy.turns] == [None, 0, None]
    assert whole(policy.turns, 1) == whole(policy.turns, 2)


def test_tokens_that_go_on_from_a_turn_are_its_extension() -> None:
    policy = ScriptedPolicy(["one", "two", "three"])

    async def play() -> None:
        first = await policy.sample("Count: ")
        tokens = [*b"Count: ", *first.turn.completion.tolist()]
        second = await policy.sample(tokens, forced=", ")
        await policy.sample([*tokens, *second.turn.completion.tolist(), 32])

    asyncio.run(play())
    assert [turn.parent for turn in policy.turns] == [None, 0, 1]
    assert [turn.prompt.tokens.tolist() for turn in policy.turns] == [[*b"Count: "], [], [32]]


def test_a_forced_token_is_not_counted_as_sampled() -> None:
    policy = ScriptedPolicy(["no"])
    reply = asyncio.run(policy.chat(OPENING, forced="I say "))
    assert reply.text == "I say no"
    assert reply.turn.sampled_mask.tolist() == [False] * 6 + [True] * 3
    assert reply.turn.logprobs.tolist() == [0.0] * 6 + [-1.0] * 3
    assert reply.turn.completion.tolist() == [*b"I say no", END]


def test_rewards_belong_to_the_last_turn_and_add_up() -> None:
    policy = ScriptedPolicy(["one", "two"])
    with pytest.raises(ValueError, match="needs a turn"):
        policy.reward(1.0)

    async def play() -> None:
        await policy.chat(OPENING)
        policy.reward(0.5)
        policy.reward(0.25)
        await policy.chat(OPENING)

    asyncio.run(play())
    assert [turn.reward for turn in policy.turns] == [0.75, None]


@pytest.mark.parametrize("value", [np.float32(1.5), np.int64(2), True, 0.5])
def test_the_reward_of_a_turn_is_a_plain_number(value: float) -> None:
    policy = ScriptedPolicy(["one"])
    asyncio.run(policy.chat(OPENING))
    policy.reward(value)
    assert type(policy.turns[0].reward) is float
    assert policy.turns[0].reward == value


@pytest.mark.parametrize("value", ["1", None, np.zeros(1), float("nan")])
def test_what_is_no_number_is_no_reward_of_a_turn(value: float) -> None:
    policy = ScriptedPolicy(["one"])
    asyncio.run(policy.chat(OPENING))
    with pytest.raises(ValueError, match="the reward of a turn must be a finite number, not "):
        policy.reward(value)


def test_each_turn_asks_with_its_own_seed_and_the_run_s_settings() -> None:
    chat = ByteChat()
    sampler = ScriptedSampler(lambda prompt, seed: "yes", chat=chat, version=3)
    policy = RecordingPolicy(
        sampler=lambda: sampler, chat=chat, sampling=Sampling(50, temperature=0.7), seed=lambda turn: 100 + turn
    )

    async def play() -> None:
        await policy.chat(OPENING)
        await policy.chat(OPENING, max_tokens=9, temperature=0.0)
        await policy.sample("Once", max_tokens=999, stop=["."])

    asyncio.run(play())
    assert [asked.seed for asked in sampler.requests] == [100, 101, 102]
    assert [asked.sampling for asked in sampler.requests] == [
        Sampling(50, temperature=0.7, stop=(END,)),
        Sampling(9, temperature=0.0, stop=(END,)),
        Sampling(50, temperature=0.7, stop=(".",)),
    ]
    assert [turn.version for turn in policy.turns] == [3, 3, 3]


def test_turns_are_limited_even_when_asked_for_at_once() -> None:
    policy = ScriptedPolicy(["one", "two", "three"], limits=Limits(max_turns=2))

    async def play() -> list[object]:
        return await asyncio.gather(*(policy.chat(OPENING) for _ in range(3)), return_exceptions=True)

    results = asyncio.run(play())
    assert [isinstance(result, LimitReached) for result in results] == [False, False, True]
    assert len(policy.turns) == 2


def test_a_completion_gets_the_room_that_the_context_leaves() -> None:
    policy = ScriptedPolicy(["a long reply", "?"], limits=Limits(context_tokens=20))

    async def play() -> None:
        reply = await policy.sample("0123456789", forced="ab")
        assert reply.truncated
        assert len(reply.turn.completion) == 10
        with pytest.raises(LimitReached, match="20 tokens fills the context of 20"):
            await policy.sample("01234567890123456789")

    asyncio.run(play())
    assert len(policy.turns) == 1


def test_a_reply_that_needs_more_room_than_the_context_leaves_is_not_asked_for() -> None:
    policy = ScriptedPolicy(["never"], limits=Limits(context_tokens=20))

    async def play() -> None:
        with pytest.raises(ContextFull, match="a prompt of 11 tokens leaves 9 of 20, and a reply needs 10"):
            await policy.chat(OPENING, min_reply_tokens=10)

    asyncio.run(play())
    assert policy.context_tokens == 20
    assert policy.turns == ()


def test_a_conversation_may_be_given_less_than_the_context() -> None:
    policy = ScriptedPolicy(["a long reply", "never"], limits=Limits(context_tokens=200))

    async def play() -> None:
        reply = await policy.chat(OPENING, context_tokens=15)
        assert (reply.truncated, len(reply.tokens)) == (True, 15)
        with pytest.raises(ContextFull, match="a prompt of 11 tokens fills the context of 11"):
            await policy.chat(OPENING, context_tokens=11)

    asyncio.run(play())


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one message"):
        asyncio.run(ScriptedPolicy(["?"]).chat([]))


def test_arrays_have_the_types_that_training_expects() -> None:
    policy = ScriptedPolicy(["é"])
    asyncio.run(policy.chat(OPENING, forced="a"))
    (turn,) = policy.turns
    kinds = (turn.prompt.tokens.dtype, turn.completion.dtype, turn.logprobs.dtype, turn.sampled_mask.dtype)
    assert kinds == (np.int32, np.int32, np.float32, np.bool_)
