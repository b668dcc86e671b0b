from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.policy import Limits
from rlkit.testing import ByteChat, ScriptedPolicy

from .playing import whole

THOUGHT = "<think>\n hm </think>\n\n"


def language_model(policy: ScriptedPolicy, **settings: object):
    from rlkit.envs.harbor.agents.llm import PolicyLLM

    return PolicyLLM(policy, model_name="m", **settings)


def chat_with(policy: ScriptedPolicy, prompts: Sequence[str], *, interleaved: bool = False, **settings: object):
    """Harbor's own conversation over a policy; its answers."""
    from harbor.llms.chat import Chat

    async def main() -> list[object]:
        chat = Chat(language_model(policy, **settings), interleaved_thinking=interleaved)
        return [await chat.chat(prompt) for prompt in prompts]

    return asyncio.run(main())


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_conversation_extends_its_exact_tokens_with_thinking_and_spaces(interleaved: bool) -> None:
    policy = ScriptedPolicy([f"{THOUGHT} one ", "two\n", f"{THOUGHT}three"])
    answers = chat_with(policy, ["a", "b", "c"], interleaved=interleaved)
    assert [turn.parent for turn in policy.turns] == [None, 0, 1]
    assert [(answer.content, answer.reasoning_content) for answer in answers] == [
        ("one", "hm"),
        ("two", None),
        ("three", "hm"),
    ]
    assert all(answer.prompt_token_ids is None for answer in answers)  # the policy keeps the record


def test_a_format_that_drops_thinking_only_starts_new_segments() -> None:
    policy = ScriptedPolicy([f"{THOUGHT}one", "two", "three"], chat=ByteChat(keeps_thinking=False))
    chat_with(policy, ["a", "b", "c"])
    assert [turn.parent for turn in policy.turns] == [None, None, 1]


def test_equal_replies_after_different_histories_keep_their_thinking() -> None:
    policy = ScriptedPolicy(["<think>x</think>same", "<think>y</think>same", "left", "right"])
    llm = language_model(policy)

    async def main() -> None:
        assert [(await llm.call(prompt)).content for prompt in ("a", "b")] == ["same", "same"]
        for prompt in ("a", "b"):
            history = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "same"}]
            await llm.call("go on", message_history=history)

    asyncio.run(main())
    assert [turn.parent for turn in policy.turns] == [None, None, 0, 1]


def test_usage_counts_the_tokens_of_prompt_and_completion() -> None:
    policy = ScriptedPolicy(["one", "two"])
    answers = chat_with(policy, ["a", "b"])
    for answer, request, turn in zip(answers, policy.sampler.requests, policy.turns, strict=True):
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
            len(request.prompt),
            len(turn.completion),
        )


def test_a_prompt_that_leaves_too_little_room_is_not_sampled() -> None:
    from harbor.llms.base import ContextLengthExceededError

    policy = ScriptedPolicy(["never"], limits=Limits(context_tokens=100), max_tokens=50)
    llm = language_model(policy)
    assert llm.reserve_tokens == 25  # a quarter of the context
    with pytest.raises(ContextLengthExceededError, match="a reply needs 25"):
        asyncio.run(llm.call("a" * 80))
    assert policy.turns == ()
    assert language_model(policy, max_tokens=10).reserve_tokens == 10
    assert language_model(policy, reserve_tokens=40).reserve_tokens == 40


def test_a_truncated_reply_is_recorded_and_raised_with_its_text() -> None:
    from harbor.llms.base import ContextLengthExceededError, OutputLengthExceededError

    policy = ScriptedPolicy(["a long reply"] * 3, limits=Limits(context_tokens=60), max_tokens=40)
    with pytest.raises(OutputLengthExceededError) as cut:
        asyncio.run(language_model(policy, max_tokens=4).call("hi"))
    assert cut.value.truncated_response == "a lo"
    short = language_model(policy, reserve_tokens=1)
    with pytest.raises(ContextLengthExceededError, match="cut a reply off after 6 tokens"):
        asyncio.run(short.call("a" * 49))
    with short.accept_truncated_replies():
        assert asyncio.run(short.call("a" * 49)).content == "a long"
    assert [turn.stop for turn in policy.turns] == ["length"] * 3


def test_tokens_are_counted_exactly_up_to_a_reply_and_estimated_after_it() -> None:
    policy = ScriptedPolicy(["one" * 10, "two"])
    llm = language_model(policy)

    async def main() -> None:
        opening = [{"role": "user", "content": "a" * 100}]
        answer = await llm.call("a" * 100)
        history = [*opening, {"role": "assistant", "content": answer.content}]
        exact = len(whole(policy.turns, 0))
        assert llm.count_tokens(history) == exact
        assert 0 < llm.count_tokens([*history, {"role": "user", "content": "b" * 50}]) - exact <= 60
        assert 0 < llm.count_tokens([{"role": "user", "content": "c" * 90}]) <= 120

    asyncio.run(main())


def test_unencodable_characters_in_a_prompt_are_replaced() -> None:
    policy = ScriptedPolicy(["one", "two"])
    chat_with(policy, ["a\ud800", "b"])
    assert [turn.parent for turn in policy.turns] == [None, 0]
    assert "a?" in policy.prompts[1]


@dataclass(frozen=True)
class Move:
    """Request of an invented agent: number of history turns that it keeps, its prompt, and the reply."""

    turns_kept: int
    prompt: str
    reply: str


replies = st.text(max_size=8) | st.sampled_from([f"{THOUGHT}b", " b ", "<think>cut", "same", "</think>", '{"a": 1}'])
moves = st.builds(Move, st.integers(0, 4), st.sampled_from(["x", "y", ""]), replies)


@settings(max_examples=60, deadline=None)
@given(st.lists(moves, min_size=1, max_size=8), st.booleans(), st.integers(3, 30))
def test_the_record_is_what_was_sampled_for_any_edit_of_the_history(
    script: list[Move], keeps_thinking: bool, max_tokens: int
) -> None:
    from harbor.llms.base import OutputLengthExceededError

    chat = ByteChat(keeps_thinking=keeps_thinking)
    policy = ScriptedPolicy([move.reply for move in script], chat=chat, max_tokens=max_tokens)
    is_extension: list[bool] = []

    async def main() -> None:
        llm = language_model(policy)
        history: list[dict[str, str]] = []
        for move in script:
            is_extension.append(0 < len(history) <= 2 * move.turns_kept)
            history = history[: 2 * move.turns_kept]
            try:
                text = (await llm.call(move.prompt, message_history=history)).content
            except OutputLengthExceededError as cut:
                text = cut.truncated_response or ""
            assert isinstance(text, str)
            history = [*history, {"role": "user", "content": move.prompt}, {"role": "assistant", "content": text}]

    asyncio.run(main())
    for number, (turn, request) in enumerate(zip(policy.turns, policy.sampler.requests, strict=True)):
        assert whole(policy.turns, number) == [*request.prompt.tokens.tolist(), *turn.completion.tolist()]
        if is_extension[number] and keeps_thinking:
            assert turn.parent is not None
            assert whole(policy.turns, turn.parent) == whole(policy.turns, number - 1)
