from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.errors import ContextFull, LimitReached
from rlkit.policy import Limits
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.testing import ByteChat, ScriptedPolicy, ScriptedSampler
from rlkit.testing.policies import END
from rlkit.types import Json, Message, Sampling, Tool, Turn
from tests.builders import episode

OPENING: list[Message] = [{"role": "user", "content": "Begin."}]
MORE: Message = {"role": "user", "content": "Go on."}
TOOL: Tool = {"name": "add", "description": "adds", "parameters": {}}


def rebuild_prompt(turns: Sequence[Turn], index: int) -> list[int]:
    """The full prompt of a turn, rebuilt from the record."""
    turn = turns[index]
    prefix = (
        [] if turn.parent is None else [*rebuild_prompt(turns, turn.parent), *turns[turn.parent].completion.tolist()]
    )
    return [*prefix, *turn.prompt.tokens.tolist()]


@dataclass(frozen=True)
class Move:
    """Request of a generated rollout.

    Args:
        conversation: number of the conversation to continue; a new number starts one.
        user: user message before the reply.
        keeps_reply: True if the history keeps this reply unchanged.
        goes_back: number of replies of the conversation to forget before it continues.
    """

    conversation: int
    user: str
    reply: str
    max_tokens: int
    forced: str
    keeps_reply: bool
    tools: bool
    goes_back: int = 0


moves = st.builds(
    Move,
    conversation=st.integers(0, 2),
    user=st.text(max_size=5),
    reply=st.text(max_size=8) | st.sampled_from(["<think>a</think>b", " b ", '<tool_call>{"name": "f"', "</think>"]),
    max_tokens=st.integers(1, 12),
    forced=st.sampled_from(["", "<think>", "é"]),
    keeps_reply=st.booleans(),
    tools=st.booleans(),
    goes_back=st.integers(0, 2),
)


@given(st.lists(moves, max_size=8), st.booleans())
def test_turns_rebuild_the_exact_sampled_prompts(script: list[Move], keeps_thinking: bool) -> None:
    policy = ScriptedPolicy([move.reply for move in script], chat=ByteChat(keeps_thinking=keeps_thinking))

    async def play() -> None:
        histories: dict[int, list[Message]] = {}
        for move in script:
            history = histories.get(move.conversation, [])
            messages = [*history[: len(history) - 2 * move.goes_back], Message(role="user", content=move.user)]
            reply = await policy.chat(
                messages, tools=[TOOL] if move.tools else [], forced=move.forced, max_tokens=move.max_tokens
            )
            message = reply.message if move.keeps_reply else Message(role="assistant", content="I forgot.")
            histories[move.conversation] = [*messages, message]

    asyncio.run(play())
    turns, requests = policy.turns, policy.sampler.requests
    for index, move in enumerate(script):
        forced = list(move.forced.encode())
        assert [*rebuild_prompt(turns, index), *forced] == requests[index].prompt.tokens.tolist()
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
def test_changed_conversation_starts_a_new_segment(change: str) -> None:
    policy = ScriptedPolicy(["one", "two"])

    async def play() -> None:
        opening = [Message(role="user", content="Begin.")]
        reply = await policy.chat(opening)
        message = reply.message
        match change:
            case "text":
                message = Message(role="assistant", content="uno")
            case "in place":
                message["content"] = "uno"
            case "opening":
                opening[0]["content"] = "Start."
            case _:
                pass
        await policy.chat([*opening, message, MORE], tools=[TOOL] if change == "tools" else [])

    asyncio.run(play())
    assert [turn.parent for turn in policy.turns] == [None, None]
    assert ("uno" in policy.prompts[1]) == (change in ("text", "in place"))


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1, "b": 0}}</tool_call>'


@pytest.mark.parametrize(
    ("arguments", "parent"),
    [({"b": 0, "a": 1}, 0), ({"a": True, "b": 0}, None), ({"a": 1, "b": False}, None), ({"a": 1.0, "b": 0}, 0)],
)
def test_a_changed_type_of_an_argument_starts_a_new_segment(arguments: dict[str, Json], parent: int | None) -> None:
    policy = ScriptedPolicy([CALL, "end"])

    async def play() -> None:
        message = (await policy.chat(OPENING)).message
        (call,) = message.get("tool_calls", [])
        changed: Message = {**message, "tool_calls": [{**call, "arguments": arguments}]}
        await policy.chat([*OPENING, changed, MORE])

    asyncio.run(play())
    assert [turn.parent for turn in policy.turns] == [None, parent]


def test_a_changed_type_in_an_earlier_call_forks_before_it() -> None:
    policy = ScriptedPolicy(["one", CALL, "three", "four"])

    async def play() -> None:
        messages = [*OPENING, (await policy.chat(OPENING)).message, MORE]
        message = (await policy.chat(messages)).message
        (call,) = message.get("tool_calls", [])
        messages += [message, MORE]
        messages += [(await policy.chat(messages)).message, MORE]
        messages[len(OPENING) + 2] = {**message, "tool_calls": [{**call, "arguments": {"a": True}}]}
        await policy.chat(messages)

    asyncio.run(play())
    assert [turn.parent for turn in policy.turns] == [None, 0, 1, 0]


def test_a_changed_type_in_the_schema_of_a_tool_starts_a_new_segment() -> None:
    policy = ScriptedPolicy(["one", "two"])
    first, second = (Tool(name="f", description="", parameters={"minimum": number}) for number in (1, True))

    async def play() -> None:
        message = (await policy.chat(OPENING, tools=[first])).message
        await policy.chat([*OPENING, message, MORE], tools=[second])

    asyncio.run(play())
    assert [turn.parent for turn in policy.turns] == [None, None]


def test_concurrent_conversations_extend_their_own_tokens() -> None:
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
    rebuilt = sorted(rebuild_prompt(turns, index) for index in range(len(turns)))
    assert rebuilt == sorted(request.prompt.tokens.tolist() for request in policy.sampler.requests)


def test_concurrent_continuations_of_a_reply_fork_from_it() -> None:
    policy = ScriptedPolicy(["one", "two", "three"])

    async def play() -> None:
        reply = await policy.chat(OPENING)
        messages = [*OPENING, reply.message, MORE]
        await asyncio.gather(policy.chat(messages), policy.chat(messages))

    asyncio.run(play())
    assert [turn.parent for turn in policy.turns] == [None, 0, 0]
    assert rebuild_prompt(policy.turns, 1) == rebuild_prompt(policy.turns, 2)


def test_a_conversation_forks_from_the_last_reply_that_it_shares() -> None:
    policy = ScriptedPolicy(["one ", "two ", "three", "four", "five"])

    async def play() -> None:
        messages = list(OPENING)
        for _ in range(3):
            messages += [(await policy.chat(messages)).message, MORE]
        other: Message = {"role": "user", "content": "Go back."}
        fork = [*messages[:4], other]
        reply = await policy.chat(fork)
        await policy.chat([*fork, reply.message, other])

    asyncio.run(play())
    assert [turn.parent for turn in policy.turns] == [None, 0, 1, 1, 3]
    assert replace(episode(1.0), turns=policy.turns).fork_count == 1
    text = bytes(token for token in rebuild_prompt(policy.turns, 4) if token < 256)
    assert b"one " in text
    assert b"four" in text
    assert b"three" not in text


@pytest.mark.parametrize("format_stop", [(END,), ("<end>",)])
def test_a_stop_string_ends_a_reply(format_stop: tuple[str, ...] | tuple[int, ...]) -> None:
    chat = ByteChat()
    chat.stop = format_stop
    policy = ScriptedPolicy(["one STOP two", "three"], chat=chat)

    async def play() -> None:
        reply = await policy.chat(OPENING, stop=["never", "STOP"])
        assert reply.text == reply.message["content"] == "one "
        assert not reply.truncated
        await policy.chat([*OPENING, reply.message, MORE])

    asyncio.run(play())
    assert bytes(policy.turns[0].completion.tolist()) == b"one STOP"
    assert len(policy.turns[0].logprobs) == len(b"one STOP")
    assert policy.turns[1].parent == 0


def test_tokens_that_continue_a_turn_extend_it() -> None:
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
def test_invalid_turn_reward_is_an_error(value: float) -> None:
    policy = ScriptedPolicy(["one"])
    asyncio.run(policy.chat(OPENING))
    with pytest.raises(ValueError, match="the reward of a turn must be a finite number, not "):
        policy.reward(value)


def test_each_request_has_its_own_seed_and_the_settings_of_the_run() -> None:
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
    assert [request.seed for request in sampler.requests] == [100, 101, 102]
    assert [request.sampling for request in sampler.requests] == [
        Sampling(50, temperature=0.7, stop=(END,)),
        Sampling(9, temperature=0.0, stop=(END,)),
        Sampling(50, temperature=0.7, stop=(".",)),
    ]
    assert [turn.version for turn in policy.turns] == [3, 3, 3]


def test_turn_limit_applies_to_concurrent_requests() -> None:
    policy = ScriptedPolicy(["one", "two", "three"], limits=Limits(max_turns=2))

    async def play() -> list[object]:
        return await asyncio.gather(*(policy.chat(OPENING) for _ in range(3)), return_exceptions=True)

    results = asyncio.run(play())
    assert [isinstance(result, LimitReached) for result in results] == [False, False, True]
    assert len(policy.turns) == 2


def test_completion_is_limited_to_the_remaining_context() -> None:
    policy = ScriptedPolicy(["a long reply", "?"], limits=Limits(context_tokens=20))

    async def play() -> None:
        reply = await policy.sample("0123456789", forced="ab")
        assert reply.truncated
        assert len(reply.turn.completion) == 10
        with pytest.raises(LimitReached, match="20 tokens fills the context of 20"):
            await policy.sample("01234567890123456789")

    asyncio.run(play())
    assert len(policy.turns) == 1


def test_reply_that_cannot_fit_the_context_is_not_requested() -> None:
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


def test_empty_conversation_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one message"):
        asyncio.run(ScriptedPolicy(["?"]).chat([]))


def test_arrays_have_the_types_that_training_expects() -> None:
    policy = ScriptedPolicy(["é"])
    asyncio.run(policy.chat(OPENING, forced="a"))
    (turn,) = policy.turns
    kinds = (turn.prompt.tokens.dtype, turn.completion.dtype, turn.logprobs.dtype, turn.sampled_mask.dtype)
    assert kinds == (np.int32, np.int32, np.float32, np.bool_)
