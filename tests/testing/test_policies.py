from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.env import Env
from rlkit.errors import LimitReached, UsageError
from rlkit.policy import Limits, Policy
from rlkit.testing import ByteChat, NoisyPolicy, ScriptedPolicy
from rlkit.testing.policies import BEGIN, END, ROLES
from rlkit.types import Message, ToolCall

QUESTION: list[Message] = [{"role": "user", "content": "Spell hello backwards."}]


class Reverse(Env):
    async def rollout(self, policy: Policy) -> float:
        reply = await policy.chat(QUESTION)
        return float(reply.text.strip() == "olleh")


def test_an_environment_is_played_from_a_script() -> None:
    assert asyncio.run(Reverse().rollout(ScriptedPolicy(["olleh"]))) == 1.0
    assert asyncio.run(Reverse().rollout(ScriptedPolicy(["hello"]))) == 0.0


def test_a_function_answers_the_prompt_s_text() -> None:
    policy = ScriptedPolicy(lambda prompt: "olleh" if "backwards" in prompt else "?")
    assert asyncio.run(Reverse().rollout(policy)) == 1.0
    assert policy.prompts == ("Spell hello backwards.\n",)


def test_the_turns_are_recorded_token_for_token() -> None:
    policy = ScriptedPolicy(["olleh"])
    asyncio.run(policy.chat(QUESTION))
    (turn,) = policy.turns
    assert turn.prompt.tokens.tolist() == [
        BEGIN,
        ROLES["user"],
        *b"Spell hello backwards.",
        END,
        10,
        ROLES["assistant"],
    ]
    assert turn.completion.tolist() == [*b"olleh", END]
    assert turn.sampled_mask.all()
    assert turn.stop == "stop"


def test_a_script_that_runs_out_says_so() -> None:
    with pytest.raises(AssertionError, match=r"the script has 0 replies and .* one more.*backwards"):
        asyncio.run(Reverse().rollout(ScriptedPolicy([])))


def test_max_tokens_cuts_a_reply_off() -> None:
    reply = asyncio.run(ScriptedPolicy(["olleh"], max_tokens=3).chat(QUESTION))
    assert (reply.text, reply.truncated) == ("oll", True)
    exact = asyncio.run(ScriptedPolicy(["olleh"], max_tokens=6).chat(QUESTION))
    assert (exact.text, exact.truncated) == ("olleh", False)


def test_limits_are_those_of_a_run() -> None:
    policy = ScriptedPolicy(["a", "b"], limits=Limits(max_turns=1))
    asyncio.run(policy.chat(QUESTION))
    with pytest.raises(LimitReached):
        asyncio.run(policy.chat(QUESTION))


@pytest.mark.parametrize(
    ("stop", "completion"),
    [(("\n",), b"one\n"), (("two", "e"), b"one"), (("!",), b"one\ntwo!"), ((10,), b"one\n"), ((0, 7), b"one\ntwo\0")],
)
def test_a_reply_ends_at_the_stop_that_was_asked_for(stop: Sequence[str] | Sequence[int], completion: bytes) -> None:
    reply = asyncio.run(ScriptedPolicy(["one\ntwo"]).sample("Count:", stop=stop))
    assert reply.turn.completion.tolist() == list(completion)


def test_noise_follows_from_its_seed() -> None:
    async def sample_replies(seed: int) -> list[str]:
        policy = NoisyPolicy(seed)
        return [(await policy.sample("?")).text for _ in range(5)]

    assert asyncio.run(sample_replies(1)) == asyncio.run(sample_replies(1))
    assert asyncio.run(sample_replies(1)) != asyncio.run(sample_replies(2))


@given(st.text())
def test_text_survives_encoding(text: str) -> None:
    chat = ByteChat()
    assert chat.decode(chat.encode(text)) == text


@given(st.lists(st.integers(-5, 300)))
def test_decoding_never_raises(tokens: list[int]) -> None:
    chat = ByteChat()
    assert isinstance(chat.decode(np.array(tokens, np.int32)), str)
    assert isinstance(chat.parse(np.array(tokens, np.int32)).message["content"], str)


words = st.text(alphabet="abc éπ🙂.", max_size=20).map(str.strip)
calls = st.lists(
    st.builds(lambda name, value: (name, {"value": value}), st.sampled_from(["add", "find"]), words | st.integers()),
    max_size=3,
)


@given(content=words, thinking=words | st.none(), called=calls)
def test_a_rendered_reply_is_parsed_back(
    content: str, thinking: str | None, called: list[tuple[str, dict[str, str | int]]]
) -> None:
    message: Message = {"role": "assistant", "content": content}
    if thinking is not None:
        message["thinking"] = thinking
    if called:
        message["tool_calls"] = [
            ToolCall(id=f"call_{n}", name=name, arguments=arguments) for n, (name, arguments) in enumerate(called)
        ]
    chat = ByteChat()
    tokens = chat.render([message]).tokens
    assert chat.parse(tokens[2:-3]).message == message


def test_a_format_may_drop_earlier_thinking() -> None:
    message: Message = {"role": "assistant", "content": "Yes.", "thinking": "Hm."}
    assert "Hm." in ByteChat().decode(ByteChat().render([message]).tokens)
    assert "Hm." not in ByteChat().decode(ByteChat(keeps_thinking=False).render([message]).tokens)


def test_tools_are_part_of_the_prompt() -> None:
    prompt = ByteChat().render(QUESTION, [{"name": "add", "description": "adds", "parameters": {}}])
    assert '"name": "add"' in ByteChat().decode(prompt.tokens)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_every_role_has_its_token(role: Literal["system", "user", "assistant", "tool"]) -> None:
    assert ByteChat().render([{"role": role, "content": "x"}]).tokens[1] == ROLES[role]


def test_an_image_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="image"):
        ByteChat().render([{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}])
