from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from rlkit.chat.format import MAX_NESTING, ChatFormat
from rlkit.chat.renderers import CookbookChat, TemplateChat, chat_format
from rlkit.engine.model.model_files import load_tokenizer
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.policy import Limits
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.testing import tiny_model
from rlkit.types import IMAGE_TOKEN, Completion, Message, Prompt, Sampling, StopReason, Tool, ToolCall

TOOL: Tool = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return load_tokenizer(tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(
    scope="module", params=["chat_template", "qwen3", "qwen3_disable_thinking", "role_colon", "qwen3_instruct"]
)
def chat(request: pytest.FixtureRequest, tokenizer) -> ChatFormat:
    return chat_format("mine", tokenizer, renderer=request.param)


def tokens(chat: ChatFormat, text: str) -> list[int]:
    return chat.encode(text).tolist()


class FixedSampler:
    """A sampler that gives the same tokens each time."""

    version = 0

    def __init__(self, completion: list[int], stop: StopReason = "stop") -> None:
        self.completion, self.stop = completion, stop
        self.prompts = list[Prompt]()

    async def sample(self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1) -> list[Completion]:
        self.prompts.append(prompt)
        completion = np.array(self.completion, np.int32)
        return [Completion(completion, np.zeros(len(completion), np.float32), self.stop)]


def converse(chat: ChatFormat, sampler: FixedSampler, *questions: str) -> RecordingPolicy:
    policy = RecordingPolicy(
        sampler=lambda: sampler, chat=chat, sampling=Sampling(max_tokens=99), seed=lambda turn: turn, limits=Limits()
    )

    async def play() -> None:
        messages = list[Message]()
        for question in questions:
            messages.append({"role": "user", "content": question})
            messages.append((await policy.chat(messages)).message)

    asyncio.run(play())
    return policy


def stop_tokens(chat: ChatFormat) -> list[int]:
    stop = chat.stop[0]
    return [stop] if isinstance(stop, int) else tokens(chat, stop)


def test_follow_up_extends_the_exact_tokens_of_the_reply(
    chat: ChatFormat,
) -> None:
    letters = [token for letter in "hello there" for token in tokens(chat, letter)]
    assert letters != tokens(chat, "hello there")
    sampler = FixedSampler([*letters, *stop_tokens(chat)])
    policy = converse(chat, sampler, "one", "two", "three")
    assert [turn.parent for turn in policy.turns] == [None, 0, 1]
    for earlier, later in zip(sampler.prompts, sampler.prompts[1:], strict=False):
        assert later.tokens[: len(earlier)].tolist() == earlier.tokens.tolist()
        assert later.tokens[len(earlier) : len(earlier) + len(sampler.completion)].tolist() == sampler.completion


def test_extension_of_equal_tokens_is_the_rendered_text(chat: ChatFormat) -> None:
    sampler = FixedSampler([*tokens(chat, "hello"), *stop_tokens(chat)])
    converse(chat, sampler, "one", "two")
    rendered = chat.render(
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "two"},
        ]
    )
    after_reply = [chat.decode(prompt.tokens).split("hello")[1] for prompt in (sampler.prompts[1], rendered)]
    assert after_reply[0] == after_reply[1]


def test_text_after_a_reply_is_that_of_the_format_in_long_conversations(
    chat: ChatFormat,
) -> None:
    letters = [token for letter in "hello there" for token in tokens(chat, letter)]
    sampler = FixedSampler([*letters, *stop_tokens(chat)])
    questions = ["one", "Here is a longer one.\n\nWith two paragraphs. ", "{}", "four"]
    converse(chat, sampler, *questions)
    messages = list[Message]()
    for question, prompt in zip(questions, sampler.prompts, strict=True):
        messages.append({"role": "user", "content": question})
        written, rendered = (
            chat.decode(rendered_prompt.tokens).split("hello there")
            for rendered_prompt in (prompt, chat.render(messages))
        )
        assert (len(written), written[-1]) == (len(rendered), rendered[-1])
        messages.append({"role": "assistant", "content": "hello there"})


def test_truncated_reply_is_closed_before_the_next_turn(chat: ChatFormat) -> None:
    truncated = FixedSampler(tokens(chat, "hello"), stop="length")
    policy = converse(chat, truncated, "one", "two")
    complete = FixedSampler([*tokens(chat, "hello"), *stop_tokens(chat)])
    converse(chat, complete, "one", "two")
    assert policy.turns[1].parent == 0
    assert truncated.prompts[1].tokens.tolist() == complete.prompts[1].tokens.tolist()


@pytest.mark.parametrize("renderer", ["chat_template", "qwen3"])
def test_a_format_that_drops_thinking_starts_a_new_segment(tokenizer, renderer: str) -> None:
    chat = chat_format("mine", tokenizer, renderer=renderer)
    sampler = FixedSampler([*tokens(chat, "<think>\nhm\n</think>\n\nhello"), *stop_tokens(chat)])
    policy = converse(chat, sampler, "one", "two")
    assert [turn.parent for turn in policy.turns] == [None, None]


@pytest.mark.parametrize("renderer", ["chat_template", "qwen3"])
def test_tools_are_rendered_and_calls_are_parsed(tokenizer, renderer: str) -> None:
    chat = chat_format("mine", tokenizer, renderer=renderer)
    prompt = chat.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}], [TOOL])
    prompt_text = tokenizer.decode(prompt.tokens.tolist())
    assert "Add two numbers." in prompt_text
    assert "Be brief." in prompt_text
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    parsed = chat.parse(np.array([*tokens(chat, f"Adding. {call}"), *stop_tokens(chat)], np.int32))
    assert parsed.message["content"] == "Adding."
    (parsed_call,) = parsed.message.get("tool_calls", [])
    assert (parsed_call["name"], parsed_call["arguments"]) == ("add", {"a": 2, "b": 2})
    broken = chat.parse(np.array([*tokens(chat, '<tool_call>\n{"name": \n</tool_call>'), *stop_tokens(chat)], np.int32))
    assert len(broken.malformed_tool_calls) == 1


@pytest.mark.parametrize("renderer", ["chat_template", "qwen3"])
@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"', "[" * MAX_NESTING + "]" * MAX_NESTING])
def test_a_call_that_no_prompt_can_hold_is_malformed(tokenizer, renderer: str, value: str) -> None:
    chat = chat_format("mine", tokenizer, renderer=renderer)
    call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {value}}}}}\n</tool_call>'
    parsed = chat.parse(np.array([*tokens(chat, call), *stop_tokens(chat)], np.int32))
    assert "tool_calls" not in parsed.message
    assert len(parsed.malformed_tool_calls) == 1


@pytest.mark.parametrize("renderer", ["chat_template", "qwen3"])
def test_thinking_is_separated_from_the_answer(tokenizer, renderer: str) -> None:
    chat = chat_format("mine", tokenizer, renderer=renderer)
    parsed = chat.parse(np.array([*tokens(chat, "<think>\nhm\n</think>\n\n4"), *stop_tokens(chat)], np.int32))
    assert parsed.message["content"] == "4"
    assert parsed.message.get("thinking") == "hm"


def test_the_recommended_renderer_is_the_default(tokenizer) -> None:
    assert isinstance(chat_format("Qwen/Qwen3-8B", tokenizer), CookbookChat)
    assert isinstance(chat_format("me/my-model", tokenizer), TemplateChat)


def test_unknown_renderer_is_an_error_of_one_line(tokenizer) -> None:
    with pytest.raises(UsageError, match=r"chat\.renderer: Unknown renderer: qwen33"):
        chat_format("mine", tokenizer, renderer="qwen33")


def test_template_without_images_rejects_them(tokenizer) -> None:
    message: Message = {"role": "user", "content": [{"type": "image", "image": "x.png"}]}
    with pytest.raises(UsageError, match="does not support images"):
        TemplateChat(tokenizer).render([message])


def test_a_model_without_a_template_can_still_be_sampled(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    for name in ("chat_template.jinja",):
        (folder / name).unlink(missing_ok=True)
    plain = load_tokenizer(folder)
    plain.chat_template = None
    chat = TemplateChat(plain)
    assert chat.decode(chat.encode("hello")) == "hello"
    with pytest.raises(UsageError, match="no chat template"):
        chat.render([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("renderer", ["qwen3", "qwen3_instruct", "kimi_k2", "nemotron3"])
def test_renderer_without_images_rejects_them(tokenizer, renderer: str) -> None:
    from PIL import Image
    from tinker_cookbook.renderers import get_renderer

    chat = CookbookChat(get_renderer(renderer, tokenizer))
    file = BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    dot = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
    call: ToolCall = {"id": "call_0", "name": "add", "arguments": {}}
    conversation: list[Message] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "tool_call_id": "call_0", "content": [{"type": "image", "image": dot}]},
    ]
    with pytest.raises(UsageError, match=r"chat\.renderer: .* does not support images: choose one that does"):
        chat.render(conversation, [TOOL])
    chat.render([*conversation[:2], {**conversation[2], "content": "a dot"}], [TOOL])


def test_images_of_a_conversation_become_part_of_the_prompt(tokenizer) -> None:
    from tinker.types import EncodedTextChunk, ImageChunk
    from tinker_cookbook.renderers import Renderer, get_renderer
    from tinker_cookbook.renderers.base import RenderedMessage

    text = get_renderer("qwen3_instruct", tokenizer)

    class Seeing(type(text)):  # type: ignore[misc]  a cookbook renderer that shows its images to the service
        def render_message(self, message, ctx) -> RenderedMessage:
            if isinstance(message["content"], str):
                return super().render_message(message, ctx)
            parts = [
                ImageChunk(data=part["image"].encode(), format="png", expected_tokens=3)
                if part["type"] == "image"
                else EncodedTextChunk(tokens=tokenizer.encode(part["text"], add_special_tokens=False))
                for part in message["content"]
            ]
            return RenderedMessage(header=EncodedTextChunk(tokens=[5]), output=parts)

    renderer: Renderer = Seeing(tokenizer)
    chat = CookbookChat(renderer)
    question: Message = {
        "role": "user",
        "content": [{"type": "text", "text": "look"}, {"type": "image", "image": "cat"}, {"type": "text", "text": "!"}],
    }
    sampler = FixedSampler([*tokens(chat, "a cat"), *stop_tokens(chat)])
    policy = RecordingPolicy(
        sampler=lambda: sampler, chat=chat, sampling=Sampling(max_tokens=99), seed=lambda turn: turn, limits=Limits()
    )

    async def play() -> None:
        reply = await policy.chat([question])
        await policy.chat([question, reply.message, {"role": "user", "content": "sure?"}])

    asyncio.run(play())
    first, second = sampler.prompts
    (image,) = first.images
    assert (image.data, image.length) == (b"cat", 3)
    assert first.tokens[image.start : image.start + 3].tolist() == [IMAGE_TOKEN] * 3
    assert second.images == first.images
    assert [turn.parent for turn in policy.turns] == [None, 0]
    assert policy.turns[1].prompt.images == ()

    shown = RecordingPolicy(
        sampler=lambda: sampler,
        chat=chat,
        sampling=Sampling(max_tokens=99),
        seed=lambda turn: turn,
        limits=Limits(),
        is_supervised=True,
    )
    shown.demonstrate([question, {"role": "assistant", "content": "a cat"}])
    assert shown.turns[0].prompt.images == first.images
    assert shown.turns[0].completion.tolist() == policy.turns[0].completion.tolist()
    with pytest.raises(EnvironmentFault, match="message 0, of the role user, has an image: leave it out"):
        shown.demonstrate([question], trained=[0])


def test_template_without_tools_gets_tools_and_calls_as_text(byte_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(byte_model_dir)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    chat = TemplateChat(tokenizer)
    tool: Tool = {"name": "look", "description": "Look.", "parameters": {}}
    call: ToolCall = {"id": "c", "name": "look", "arguments": {"at": 1}}
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Well.", "tool_calls": [call]},
        {"role": "tool", "content": "a cat", "tool_call_id": "c"},
    ]
    text = chat.decode(chat.render(messages, [tool]).tokens)
    assert text.startswith("[system]Be brief.\n\nYou may call one or more functions.")
    assert '{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}' in text
    call_text = 'Well.\n<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    assert f"[user]Go.[assistant]{call_text}[tool]a cat[assistant]" in text
    assert chat.parse(chat.encode(call_text)).message["tool_calls"][0]["arguments"] == {"at": 1}
    assert chat.decode(chat.render(messages[:2]).tokens) == "[system]Be brief.[user]Go.[assistant]"


def test_a_long_text_is_no_warning(byte_model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(byte_model_dir)
    chat = chat_format(str(byte_model_dir), tokenizer, renderer="chat_template")
    length = tokenizer.model_max_length + 1
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)  # the library's logger does not propagate
    try:
        assert len(chat.encode("a" * length)) >= length
        assert caplog.messages == []
        tokenizer.encode("a" * length)
        assert "longer than the specified maximum" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)
