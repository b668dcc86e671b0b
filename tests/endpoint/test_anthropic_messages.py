"""Anthropic's own client at the endpoint of a rollout: its conversations are those of `policy.chat`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import MessageParam, ToolParam

import rlkit
from rlkit.endpoint import Endpoint, http_responses, open_endpoint
from rlkit.errors import ServiceError
from rlkit.policy import Limits
from rlkit.testing import ByteChat, ScriptedPolicy, ScriptedSampler
from rlkit.types import Prompt, Turn
from tests.limits import HANG_S

SAME_ADD: rlkit.Tool = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
ADD: ToolParam = {
    "name": "add",
    "description": "Add.",
    "input_schema": {"type": "object", "properties": {}},
    "cache_control": {"type": "ephemeral"},
}
BEGIN: MessageParam = {"role": "user", "content": "begin"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}</tool_call>'
REPLIES = [
    f"<think>\nadd twice\n</think>\n\nI add.{CALL}{CALL}",
    f"<think>\n\n</think>\n\n{CALL}",
    f"{CALL}",
    "<think>\nalmost\n</think>\n\nsix",
    "<think>\nno answer",
    "seven",
]


class RecordingChat(ByteChat):
    """Chat format that knows the conversations whose prompts it rendered whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conversations: list[Sequence[rlkit.Message]] = []

    def render(self, messages: Sequence[rlkit.Message], tools: Sequence[rlkit.Tool] = ()) -> Prompt:
        self.conversations.append(list(messages))
        return super().render(messages, tools)


def play[T](policy: ScriptedPolicy, work: Callable[[AsyncAnthropic], Awaitable[T]]) -> T:
    async def main() -> T:
        async with policy.endpoint() as endpoint, connect(endpoint) as client:
            return await work(client)

    return asyncio.run(main())


def connect(endpoint: Endpoint) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=endpoint.root, api_key=endpoint.key)


def ask(policy: ScriptedPolicy, **settings: Any) -> anthropic.types.Message:
    async def work(client: AsyncAnthropic) -> anthropic.types.Message:
        return await client.messages.create(**{"model": "m", "max_tokens": 400, "messages": [BEGIN], **settings})

    return play(policy, work)


def describe(turns: tuple[Turn, ...]) -> list[object]:
    return [(turn.prompt.tokens.tolist(), turn.completion.tolist(), turn.parent, turn.stop) for turn in turns]


async def hold_conversation(client: AsyncAnthropic, *, stream: bool) -> None:
    """Hold a conversation of six replies, the first three with tool calls, as agents do."""
    messages: list[MessageParam] = [BEGIN]
    system: Any = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": None}]
    options: Any = {"model": "m", "max_tokens": 200, "system": system, "tools": [ADD]}
    for _ in REPLIES:
        if stream:
            async with client.messages.stream(messages=messages, **options) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(messages=messages, **options)
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"a": 1, "b": [2, "é"]}] * len(calls)
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"{n}"} for n, call in enumerate(calls)]
        if len(calls) == 1:
            results[0] |= {"content": [{"type": "text", "text": "not a number"}], "is_error": True}
        said = [] if len(calls) == 1 else [{"type": "text", "text": "go "}, {"type": "text", "text": "on"}]
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [*results, *said]},
        ]


async def hold_same_conversation(policy: rlkit.Policy) -> None:
    messages: list[rlkit.Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "begin"}]
    for _ in REPLIES:
        reply = await policy.chat(messages, tools=[SAME_ADD], max_tokens=200)
        messages.append(reply.message)
        calls = reply.tool_calls
        for number, call in enumerate(calls):
            content = "not a number" if len(calls) == 1 else str(number)
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": "add", "content": content})
        if len(calls) != 1:
            messages.append({"role": "user", "content": "go on"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_has_the_tokens_of_chat(stream: bool) -> None:
    chats = RecordingChat(), RecordingChat()
    policy, expected = (ScriptedPolicy(REPLIES, chat=chat) for chat in chats)
    play(policy, lambda client: hold_conversation(client, stream=stream))
    asyncio.run(hold_same_conversation(expected))
    assert describe(policy.turns) == describe(expected.turns)
    assert [turn.parent for turn in policy.turns] == [None, 0, 1, 2, 3, 4]
    assert chats[0].conversations == chats[1].conversations


def test_a_reply_is_blocks() -> None:
    policy = ScriptedPolicy(REPLIES)
    message = ask(policy, tools=[ADD])
    first, second, *calls = message.content
    assert first.type == "thinking"
    assert (first.thinking, bool(first.signature)) == ("add twice", True)
    assert second.type == "text"
    assert second.text == "I add."
    assert [call.type for call in calls] == ["tool_use", "tool_use"]
    assert message.usage.input_tokens == len(policy.turns[0].prompt)
    assert message.usage.output_tokens == len(policy.turns[0].completion)


def test_a_stream_has_the_events_of_anthropic() -> None:
    async def work(client: AsyncAnthropic) -> list[Any]:
        stream = await client.beta.messages.create(
            model="m", max_tokens=200, messages=[BEGIN], tools=[ADD], stream=True, betas=["any-2026-01-01"]
        )
        return [event async for event in stream]

    events = play(ScriptedPolicy(REPLIES), work)
    assert [event.delta.type for event in events if event.type == "content_block_delta"] == [
        "thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta",
    ]  # fmt: skip
    assert [event.type for event in events if event.type != "content_block_delta"] == [
        "message_start", *["content_block_start", "content_block_stop"] * 4, "message_delta", "message_stop",
    ]  # fmt: skip
    start, end = events[0].message, events[-2]
    assert (start.content, start.stop_reason, end.delta.stop_reason) == ([], None, "tool_use")
    assert (start.usage.input_tokens, start.usage.output_tokens) == (end.usage.input_tokens, 0)
    assert end.usage.output_tokens > 0


def test_dropped_thinking_starts_a_segment() -> None:
    policy = ScriptedPolicy(["<think>\nhm\n</think>\n\nyes"] * 3)

    async def work(client: AsyncAnthropic) -> None:
        reply = await client.messages.create(model="m", max_tokens=100, messages=[BEGIN])
        for content in (reply.content, reply.content[1:]):
            messages: list[MessageParam] = [BEGIN, {"role": "assistant", "content": content}, BEGIN]
            await client.messages.create(model="m", max_tokens=100, messages=messages)

    play(policy, work)
    assert [turn.parent for turn in policy.turns] == [None, 0, None]


def test_a_stop_sequence_and_max_tokens_end_a_reply() -> None:
    message = ask(ScriptedPolicy(["one two three"]), stop_sequences=["two"])
    assert [(block.type, getattr(block, "text", "")) for block in message.content] == [("text", "one ")]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")
    message = ask(ScriptedPolicy(["one two three"]), max_tokens=3)
    assert [getattr(block, "text", "") for block in message.content] == ["one"]
    assert message.stop_reason == "max_tokens"


def test_an_empty_reply_has_no_block() -> None:
    assert ask(ScriptedPolicy([""])).content == []


def test_tool_choice_none_hides_the_tools() -> None:
    policy = ScriptedPolicy(["hi", "hi"])
    ask(policy, tools=[ADD], tool_choice={"type": "none"})
    ask(policy, tools=[ADD], tool_choice={"type": "auto"})
    assert ["Tools" in prompt for prompt in policy.prompts] == [False, True]


def test_parameters_of_claude_code_are_accepted() -> None:
    policy = ScriptedPolicy(["hi"])
    ask(
        policy,
        system=[{"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"}, {"type": "text", "text": "S"}],
        messages=[BEGIN, {"role": "system", "content": "Amid."}],
        thinking={"type": "adaptive"},
        metadata={"user_id": "u"},
        service_tier="auto",
        output_config={"effort": "high"},
        extra_query={"beta": "true"},
        extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}, "temperature": 0.25},
    )
    assert policy.sampler.requests[0].sampling.temperature == 0.25
    assert policy.prompts == ("S\nbegin\nAmid.\n",)


def test_blocks_of_other_models_and_images_are_read() -> None:
    chat = RecordingChat()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    thoughts = {"type": "redacted_thinking", "data": "x"}
    content = [{"type": "text", "text": "see"}, image]
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}
    said = [BEGIN, {"role": "assistant", "content": [thoughts, call]}, {"role": "user", "content": [result, *content]}]
    with pytest.raises(rlkit.EnvironmentFault, match="ByteChat renders text only"):
        ask(ScriptedPolicy(["hi"], chat=chat), messages=said)
    (messages,) = chat.conversations
    shown = {"type": "image", "image": "data:image/png;base64,AAAA"}
    assert messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "toolu_1", "name": "look", "arguments": {}}]},
        {"role": "tool", "content": [shown], "tool_call_id": "toolu_1", "name": "look"},
        {"role": "user", "content": [{"type": "text", "text": "see"}, shown]},
    ]


THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize("keeps_thinking", [True, False])
def test_counted_tokens_are_those_of_the_next_prompt(keeps_thinking: bool) -> None:
    chat = ByteChat()
    chat.keeps_thinking = keeps_thinking
    policy = ScriptedPolicy(REPLIES, chat=chat, limits=Limits(max_turns=len(REPLIES)))

    async def work(client: AsyncAnthropic) -> None:
        messages: list[MessageParam] = [BEGIN]
        settings: Any = {"model": "m", "system": "Be brief.", "tools": [ADD], "thinking": THINKING}
        for count in range(len(REPLIES)):
            counted = await client.messages.count_tokens(messages=messages, **settings)
            beta = await client.beta.messages.count_tokens(messages=messages, **settings)
            assert len(policy.turns) == count
            message = await client.messages.create(messages=messages, max_tokens=200, **settings)
            assert counted.input_tokens == beta.input_tokens == message.usage.input_tokens
            messages += [{"role": "assistant", "content": message.content}, BEGIN]
        assert (await client.messages.count_tokens(messages=messages, **settings)).input_tokens > 0

    play(policy, work)
    assert len(policy.turns) == len(REPLIES)


def test_tokens_are_counted_beyond_the_context_and_without_the_agents_turns() -> None:
    async def main() -> int:
        policy = ScriptedPolicy([], limits=Limits(context_tokens=5))
        async with open_endpoint(policy, max_turns=0) as endpoint, connect(endpoint) as client:
            counted = await client.messages.count_tokens(model="m", messages=[BEGIN])
            assert endpoint.limit is None
            return counted.input_tokens

    assert asyncio.run(main()) == len(ByteChat().render([{"role": "user", "content": "begin"}]))


def test_a_conversation_that_cannot_be_counted_is_an_error_and_no_failure_of_the_rollout() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}

    async def work(client: AsyncAnthropic) -> None:
        messages: Any = [{"role": "user", "content": [image]}]
        with pytest.raises(anthropic.BadRequestError, match="ByteChat renders text only"):
            await client.messages.count_tokens(model="m", messages=messages)
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            await client.messages.count_tokens(model="m", messages=[BEGIN], tools=[ADD], tool_choice={"type": "any"})
        await client.messages.create(model="m", max_tokens=9, messages=[BEGIN])

    play(policy := ScriptedPolicy(["fine"]), work)
    assert len(policy.turns) == 1


def test_a_client_that_leaves_cancels_its_count() -> None:
    waiting, cancelled = asyncio.Event(), asyncio.Event()

    class Stuck(ScriptedPolicy):
        async def count_tokens(self, *arguments: Any, **options: Any) -> int:
            waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return 0

    async def work(client: AsyncAnthropic) -> None:
        counting = asyncio.create_task(client.messages.count_tokens(model="m", messages=[BEGIN]))
        await waiting.wait()
        counting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await counting
        async with asyncio.timeout(HANG_S):
            await cancelled.wait()

    play(Stuck([]), work)


FILE = {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"extra_body": {"top_p": 0.5}}, "top_p"),
        ({"extra_body": {"strange": 1}}, "strange"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [BEGIN, {"role": "assistant", "content": "Well,"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [FILE]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content"),
    ],
)
def test_a_request_for_what_cannot_be_had_is_an_error(settings: dict[str, Any], field: str) -> None:
    policy = ScriptedPolicy(["hi"])
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(policy, **settings)
    assert read_error(caught.value)["type"] == "invalid_request_error"
    assert field in read_error(caught.value)["message"]
    assert not policy.turns


def read_error(error: anthropic.APIStatusError) -> dict[str, str]:
    body: Any = error.body
    assert body["type"] == "error"
    return body["error"]


class FailingSampler(ScriptedSampler):
    """A sampler whose service is down, and its number of requests."""

    calls = 0

    async def sample(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        await asyncio.sleep(0.05)
        raise ServiceError("the service is down", request_id="r1")


@pytest.mark.parametrize(
    ("limits", "message"),
    [(Limits(max_turns=0), "max_turns"), (Limits(context_tokens=5), "prompt is too long: a prompt of")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_limits_are_errors_that_the_client_does_not_repeat(limits: Limits, message: str, stream: bool) -> None:
    async def work(client: AsyncAnthropic) -> None:
        reply: Any = await client.messages.create(model="m", max_tokens=9, messages=[BEGIN], stream=stream)
        [_ async for _ in reply]

    with pytest.raises(anthropic.APIStatusError) as caught:
        play(ScriptedPolicy([], limits=limits), work)
    assert read_error(caught.value)["type"] == "invalid_request_error"
    assert message in read_error(caught.value)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_service_ends_the_rollout_whatever_the_client_does(stream: bool) -> None:
    policy = ScriptedPolicy([])
    policy.sampler = sampler = FailingSampler(lambda prompt, *, seed: "", chat=ByteChat())

    async def work(client: AsyncAnthropic) -> None:
        with pytest.raises(anthropic.APIStatusError) as caught:
            reply: Any = await client.messages.create(model="m", max_tokens=9, messages=[BEGIN], stream=stream)
            [_ async for _ in reply]
        assert read_error(caught.value)["type"] == "api_error"

    with pytest.raises(ServiceError, match="r1"):
        play(policy, work)
    assert sampler.calls == 1


def test_a_key_reaches_its_own_rollout_and_paths_are_few() -> None:
    async def main() -> None:
        async with ScriptedPolicy([]).endpoint() as endpoint, connect(endpoint) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.messages.batches.list()
            assert read_error(missing.value)["type"] == "not_found_error"
            stranger = client.with_options(api_key="wrong")
            for request in (
                stranger.models.list(),
                stranger.messages.create(model="m", max_tokens=9, messages=[BEGIN]),
                stranger.messages.count_tokens(model="m", messages=[BEGIN]),
            ):
                with pytest.raises(anthropic.AuthenticationError) as rejected:
                    await request
                assert read_error(rejected.value)["type"] == "authentication_error"

    asyncio.run(main())


def test_a_stream_that_waits_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_responses, "KEEP_ALIVE_S", 0.01)

    may_answer = asyncio.Event()

    class Slow(ScriptedSampler):
        async def sample(self, *arguments: Any, **options: Any) -> Any:
            await may_answer.wait()
            return await super().sample(*arguments, **options)

    policy = ScriptedPolicy(["hi"])
    policy.sampler = Slow(lambda prompt, *, seed: "hi", chat=ByteChat())

    async def main() -> str:
        async with policy.endpoint() as endpoint, httpx.AsyncClient() as client:
            body, text = {"messages": [BEGIN], "stream": True}, ""
            url, headers = f"{endpoint.url}/messages", {"x-api-key": endpoint.key}
            async with client.stream("POST", url, json=body, headers=headers) as response:
                async for piece in response.aiter_text():
                    text += piece
                    if text.count("event: ping") > 3:
                        may_answer.set()
            return text

    *pings, start = asyncio.run(main()).partition("event: message_start")[0].split("\n\n")
    assert len(pings) > 3
    assert set(pings) == {'event: ping\ndata: {"type": "ping"}'}
    assert start == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(stream: bool) -> None:
    waiting, cancelled = asyncio.Event(), asyncio.Event()

    class Stuck(ScriptedSampler):
        async def sample(self, *arguments: Any, **options: Any) -> Any:
            waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

    policy = ScriptedPolicy([])
    policy.sampler = Stuck(lambda prompt, *, seed: "", chat=ByteChat())

    async def ask(client: AsyncAnthropic) -> None:
        reply: Any = await client.messages.create(model="m", max_tokens=9, messages=[BEGIN], stream=stream)
        [_ async for _ in reply]

    async def work(client: AsyncAnthropic) -> None:
        asking = asyncio.create_task(ask(client))
        await waiting.wait()
        await asyncio.sleep(0.02)  # the stream has opened
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(HANG_S):
            await cancelled.wait()

    play(policy, work)
    assert not policy.turns


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"messages": 1}',
        b'{"messages": [{"role": "tool", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "output_config": 1}',
        b'{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": 1}]}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "a", "input_schema": '
        + b'{"a":' * 9999
        + b"1"
        + b"}" * 9999
        + b"}]}",
    ],
)
def test_a_malformed_body_is_an_error(body: bytes) -> None:
    async def main() -> httpx.Response:
        async with ScriptedPolicy([]).endpoint() as endpoint, httpx.AsyncClient() as client:
            return await client.post(f"{endpoint.url}/messages", content=body, headers={"x-api-key": endpoint.key})

    response = asyncio.run(main())
    assert response.status_code == 400
    assert json.loads(response.content)["error"]["type"] == "invalid_request_error"
