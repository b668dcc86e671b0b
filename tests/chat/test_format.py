from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.chat.format import MAX_NESTING, extend, parse_text
from rlkit.testing import ByteChat, ScriptedPolicy
from rlkit.testing.policies import END, ROLES
from rlkit.types import Message, as_prompt

OPENING: list[Message] = [{"role": "user", "content": "Begin."}]
ANSWER: Message = {"role": "user", "content": "Go on."}

PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', " ", "\n", "a", "é"]
marked_up = st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map("".join)


@given(st.text() | marked_up)
def test_parsing_never_raises(text: str) -> None:
    parsed = parse_text(text)
    assert parsed.message["role"] == "assistant"
    assert isinstance(parsed.message["content"], str)
    json.dumps(parsed.message)


def test_thinking_and_calls_are_removed_from_the_text() -> None:
    text = '<think>\nHm.\n</think>\n\nLet me add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert parse_text(text).message == {
        "role": "assistant",
        "content": "Let me add.",
        "thinking": "Hm.",
        "tool_calls": [{"id": "call_0", "name": "add", "arguments": {"a": 1}}],
    }


def test_truncated_thinking_leaves_no_text() -> None:
    assert parse_text("<think>for ever").message == {"role": "assistant", "content": "", "thinking": "for ever"}


def nested(levels: int) -> str:
    return '{"name": "f", "arguments": {"a": %s}}' % ("[" * levels + "]" * levels)


@pytest.mark.parametrize(
    "call",
    [
        "",
        "{}",
        "[1]",
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": []}',
        '{"name": "f"',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}",
        nested(MAX_NESTING),
        nested(100_000),
    ],
    ids=lambda call: call[:30],
)
def test_unusable_call_is_malformed(call: str) -> None:
    parsed = parse_text(f"Well: <tool_call>{call}</tool_call>")
    assert parsed.malformed_tool_calls == (call,)
    assert parsed.message == {"role": "assistant", "content": "Well:"}


def test_call_of_the_maximal_depth_is_accepted() -> None:
    assert not parse_text(f"<tool_call>{nested(MAX_NESTING - 1)}</tool_call>").malformed_tool_calls


@given(reply=st.text() | marked_up, keep=st.none() | st.integers(0, 12))
def test_a_follow_up_extends_the_exact_tokens_of_a_reply(reply: str, keep: int | None) -> None:
    chat = ByteChat()
    policy = ScriptedPolicy([reply], chat=chat, max_tokens=len(reply.encode()) + 1 if keep is None else keep + 1)
    parsed_reply = asyncio.run(policy.chat(OPENING))
    (turn,) = policy.turns
    prefix = turn.prompt + as_prompt(turn.completion)
    longer = extend(chat, prefix, turn, [*OPENING, parsed_reply.message, ANSWER], replied=1, tools=())
    assert longer is not None
    assert longer.starts_with(prefix)
    end = [END] if turn.stop == "length" else []
    rest = [*end, 10, ROLES["user"], *b"Go on.", END, 10, ROLES["assistant"]]
    if turn.stop == "stop":
        assert longer.drop_first(len(prefix)).tokens.tolist() == rest
    else:  # what was cut off may be completed first, as the format writes it
        assert longer.tokens.tolist()[-len(rest) :] == rest


@pytest.mark.parametrize(("keeps", "parents"), [(True, [None, 0]), (False, [None, None])])
def test_a_format_that_drops_thinking_starts_a_new_segment(keeps: bool, parents: Sequence[int | None]) -> None:
    policy = ScriptedPolicy(["<think>Hm.</think>Yes.", "No."], chat=ByteChat(keeps_thinking=keeps))

    async def play() -> None:
        first = await policy.chat(OPENING)
        await policy.chat([*OPENING, first.message, ANSWER])

    asyncio.run(play())
    assert [turn.parent for turn in policy.turns] == parents
    assert ("Hm." in policy.prompts[1]) == keeps


def test_a_format_that_drops_thinking_extends_a_reply_without_any() -> None:
    policy = ScriptedPolicy(["  Yes. ", "No."], chat=ByteChat(keeps_thinking=False))

    async def play() -> None:
        first = await policy.chat(OPENING)
        await policy.chat([*OPENING, first.message, ANSWER])

    asyncio.run(play())
    assert [turn.parent for turn in policy.turns] == [None, 0]
