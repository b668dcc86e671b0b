"""Conversations as training sequences, against those of tinker-cookbook's renderers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tinker_cookbook.renderers import TrainOnWhat, get_renderer

from rlkit.algorithms.datums import episode_data
from rlkit.chat.demonstration import split_conversation
from rlkit.chat.format import ChatFormat
from rlkit.chat.renderers import chat_format
from rlkit.engine.model.model_files import load_tokenizer
from rlkit.errors import EnvironmentFault
from rlkit.policy import Limits
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.testing import ByteChat, tiny_model
from rlkit.types import Completion, Datum, Episode, Message, Prompt, Sampling, Tool

TALK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6, of course."},
]
THOUGHT: list[Message] = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4", "thinking": "Two and two."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6", "thinking": "Three and three."},
]
CALL: list[Message] = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "name": "add", "arguments": {"a": 2, "b": 2}}]},
    {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "add"},
    {"role": "assistant", "content": "It is 4."},
]
TOOL: Tool = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


class NeverSampling:
    version = 3

    async def sample(self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1) -> list[Completion]:
        raise AssertionError("a demonstration samples nothing")


def make_policy(chat: ChatFormat, *, context: int | None = None) -> RecordingPolicy:
    limits = Limits(context_tokens=context)
    sampling = Sampling(max_tokens=9)
    return RecordingPolicy(
        sampler=NeverSampling,
        chat=chat,
        sampling=sampling,
        seed=lambda turn: turn,
        limits=limits,
        is_supervised=True,
    )


def data_of(policy: RecordingPolicy) -> list[Datum]:
    episode = Episode(0, 0, policy.turns, "completed", 1.0, {}, {}, 0.0)
    return [datum for _, datum in episode_data(episode, np.ones(len(policy.turns)))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.mark.parametrize("renderer", ["qwen3", "qwen3_disable_thinking", "qwen3_instruct", "role_colon"])
@pytest.mark.parametrize("messages", [TALK[:3], TALK, THOUGHT[:2]], ids=["one reply", "two replies", "thinking"])
def test_the_last_reply_is_trained_as_the_cookbook_trains_it(
    tokenizer: Any, renderer: str, messages: list[Message]
) -> None:
    if "thinking" in messages[-1] and renderer != "qwen3":
        pytest.skip("the renderer writes no thinking")
    policy = make_policy(chat_format("mine", tokenizer, renderer=renderer))
    policy.demonstrate(messages, trained=[len(messages) - 1])
    (datum,) = data_of(policy)
    parts = [{"type": "thinking", "thinking": messages[-1].get("thinking")}, {"type": "text", "text": "4"}]
    last = {"role": "assistant", "content": parts} if "thinking" in messages[-1] else messages[-1]
    conversation: Any = [*messages[:-1], last]
    expected, weights = get_renderer(renderer, tokenizer).build_supervised_example(
        conversation, TrainOnWhat.LAST_ASSISTANT_MESSAGE
    )
    assert [*datum.prompt.tokens.tolist(), int(datum.targets[-1])] == expected.to_ints()
    assert datum.mask.tolist() == (weights[1:] > 0).tolist()
    assert datum.advantages.tolist() == weights[1:].tolist()


def test_replies_that_extend_each_other_are_one_sequence(tokenizer: Any) -> None:
    policy = make_policy(chat_format("mine", tokenizer, renderer="qwen3_instruct"))
    policy.demonstrate(TALK)
    (datum,) = data_of(policy)
    conversation: Any = TALK
    expected, weights = get_renderer("qwen3_instruct", tokenizer).build_supervised_example(
        conversation, TrainOnWhat.ALL_ASSISTANT_MESSAGES
    )
    assert [*datum.prompt.tokens.tolist(), int(datum.targets[-1])] == expected.to_ints()
    assert datum.mask.tolist() == (weights[1:] > 0).tolist()
    assert [turn.version for turn in policy.turns] == [3, 3]
    assert [turn.parent for turn in policy.turns] == [None, 0]
    assert [message["role"] for turn in policy.turns for message in turn.messages] == [
        "system", "user", "assistant", "user", "assistant"
    ]  # fmt: skip


def test_replies_whose_thinking_is_dropped_later_are_sequences_of_their_own(tokenizer: Any) -> None:
    chat = chat_format("mine", tokenizer, renderer="qwen3")
    policy = make_policy(chat)
    policy.demonstrate(THOUGHT)
    first, second = data_of(policy)
    assert "Two and two." in chat.decode(first.targets)
    assert "Two and two." not in chat.decode(second.targets)
    assert "Three and three." in chat.decode(second.targets[second.mask])


@pytest.mark.parametrize("renderer", ["chat_template", "qwen3"])
def test_calls_are_trained_and_their_results_are_not(tokenizer: Any, renderer: str) -> None:
    chat = chat_format("mine", tokenizer, renderer=renderer)
    policy = make_policy(chat)
    policy.demonstrate(CALL, tools=[TOOL])
    texts = [chat.decode(turn.completion) for turn in policy.turns]
    assert '"name": "add"' in texts[0]
    assert texts[1].strip().endswith("It is 4.")
    assert all(chat.parse(turn.completion).malformed_tool_calls == () for turn in policy.turns)
    assert chat.parse(policy.turns[0].completion).message.get("tool_calls", [])[0]["arguments"] == {"a": 2, "b": 2}
    assert "Add two numbers." in chat.decode(policy.turns[0].prompt.tokens)
    assert "Add two numbers." not in "".join(texts)


def test_a_reply_ends_with_the_token_that_the_model_samples_last(tokenizer: Any) -> None:
    chat = chat_format("mine", tokenizer, renderer="chat_template")
    policy = make_policy(chat)
    policy.demonstrate(TALK)
    assert all(int(turn.completion[-1]) in chat.stop for turn in policy.turns)  # the template goes on with a line break
    assert policy.turns[1].parent == 0


def test_any_role_can_be_trained() -> None:
    chat = ByteChat()
    ((index, prompt, tokens),) = split_conversation(chat, TALK[:2], [], [1])
    assert index == 1
    assert chat.decode(prompt.tokens) == "Be brief.\n"
    assert chat.decode(tokens) == "2 + 2?\n"
    ((_, prompt, tokens),) = split_conversation(chat, TALK[:2], [], [0])
    assert (len(prompt), chat.decode(tokens)) == (0, "Be brief.\n")


DEFAULT_PROMPT = """{%- if messages[0]['role'] != 'system' %}<|im_start|>system
You are kind.<|im_end|>
{% endif %}{%- for m in messages %}{% if STRICT and not loop.first and m.role == loop.previtem.role %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("strict", ["true", "false"])
def test_the_first_message_is_trained_without_the_default_system_prompt(
    tmp_path_factory: pytest.TempPathFactory, strict: str
) -> None:
    tokenizer = load_tokenizer(tiny_model(tmp_path_factory.mktemp("kind") / "model"))
    tokenizer.chat_template = DEFAULT_PROMPT.replace("STRICT", strict)
    chat = chat_format("mine", tokenizer, renderer="chat_template")
    ((_, prompt, tokens),) = split_conversation(chat, TALK[1:3], [], [0])
    assert "You are kind." in chat.decode(prompt.tokens)
    assert chat.decode(tokens).split() == ["user", "2", "+", "2?"]
    assert (prompt + Prompt(tokens)).tokens.tolist() == chat.render(TALK[1:2], whole=True).tokens.tolist()


class NoExtension(ByteChat):
    """A format whose prompt for a reply is not the beginning of the conversation with it."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, whole: bool = False) -> Prompt:
        return super().render(messages, tools, whole=whole) + Prompt(np.array([] if whole else [7], np.int32))


def test_what_cannot_be_trained_is_a_fault_of_the_task() -> None:
    with pytest.raises(EnvironmentFault, match="message 2, of the role assistant, has no tokens after its prompt"):
        make_policy(NoExtension()).demonstrate(TALK)
    with pytest.raises(EnvironmentFault, match="a conversation of 25 tokens does not fit the context of 20"):
        make_policy(ByteChat(), context=20).demonstrate(TALK)


def test_a_recorded_episode_is_replayed_token_for_token() -> None:
    first, second = make_policy(ByteChat()), make_policy(ByteChat())
    first.demonstrate(TALK)
    second.replay(first.turns)
    assert [turn.completion.tolist() for turn in second.turns] == [turn.completion.tolist() for turn in first.turns]
    assert [turn.parent for turn in second.turns] == [None, 0]


@pytest.mark.parametrize("reply", ["    return 1", "\n\nafter", "  x", "", "\tx", "é"])
def test_a_reply_may_begin_with_any_character(tokenizer: Any, reply: str) -> None:
    chat = chat_format("mine", tokenizer, renderer="chat_template")
    policy = make_policy(chat)
    policy.demonstrate([{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}])
    (turn,) = policy.turns
    assert turn.prompt.tokens.tolist() == chat.render([{"role": "user", "content": "?"}]).tokens.tolist()
    assert chat.decode(turn.completion).strip() == reply.strip()


def test_an_environment_either_samples_or_demonstrates() -> None:
    policy = make_policy(ByteChat())
    with pytest.raises(EnvironmentFault, match="trains on conversations, and samples no reply"):
        asyncio.run(policy.chat(TALK[:2]))
    sampling = RecordingPolicy(
        sampler=NeverSampling, chat=ByteChat(), sampling=Sampling(9), seed=lambda turn: turn, limits=Limits()
    )
    with pytest.raises(EnvironmentFault, match="only `env: demonstrations` of `envs` trains on conversations"):
        sampling.demonstrate(TALK)
    for trained in ([9], [1, 1], [-1]):
        with pytest.raises(EnvironmentFault, match=r"trained=.*: give different indices of the messages"):
            policy.demonstrate(TALK, trained=trained)
    with pytest.raises(EnvironmentFault, match="a conversation begins with a reply: put a message of the user"):
        policy.demonstrate(TALK[2:3])
