"""OpenAI's own client at the endpoint of a rollout: its conversations are those of `policy.chat`."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

import rlkit
from rlkit.chat.format import ChatFormat
from rlkit.endpoint import Endpoint, http_responses, open_endpoint
from rlkit.errors import ServiceError
from rlkit.policy import Limits
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.types import Prompt, Sampling, Turn
from tests.limits import HANG_S

SAME_ADD: rlkit.Tool = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
ADD: ChatCompletionToolParam = {
    "type": "function",
    "function": {**SAME_ADD, "strict": True},  # type: ignore[typeddict-item]  # `stream` of the client demands it
}


CALL_OF_900_LEVELS = {"id": "c", "function": {"name": "add", "arguments": '{"a": ' + 899 * "[" + 899 * "]" + "}"}}
FILE = {"type": "image_url", "image_url": {"url": "/etc/passwd"}}


def author(prompt: str, *, seed: int) -> str:
    """Call the tool first, then answer with the number of characters so far."""
    if "add" in prompt and "tool" not in prompt:
        return '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'
    return f"seen {len(prompt)} with {seed}"


def make_policy(*, chat: ChatFormat | None = None, limits: Limits = Limits(), sampler: Any = None) -> RecordingPolicy:
    chat = chat or ByteChat()
    sampler = sampler or ScriptedSampler(author, chat=chat)
    return RecordingPolicy(
        sampler=lambda: sampler, chat=chat, sampling=Sampling(max_tokens=200), seed=lambda turn: turn, limits=limits
    )


def play[T](policy: RecordingPolicy, work: Callable[[AsyncOpenAI], Awaitable[T]]) -> T:
    async def main() -> T:
        async with policy.endpoint() as endpoint, connect(endpoint) as client:
            return await work(client)

    return asyncio.run(main())


def connect(endpoint: Endpoint) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key)


def describe(turns: tuple[Turn, ...]) -> list[object]:
    return [(turn.prompt.tokens.tolist(), turn.completion.tolist(), turn.parent, turn.stop) for turn in turns]


async def hold_conversation(client: AsyncOpenAI, *, stream: bool) -> list[ChatCompletionMessageParam]:
    """Hold a conversation of three replies, the first with a tool call, as agents do."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "begin with add"}]
    for question in ("and", "so", ""):
        if stream:
            async with client.chat.completions.stream(model="any", messages=messages, tools=[ADD]) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (
                (await client.chat.completions.create(model="any", messages=messages, tools=[ADD])).choices[0].message
            )
        messages.append(message.model_dump(exclude_none=True))  # type: ignore[arg-type]
        if message.tool_calls:
            (call,) = message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 1, "b": [2]}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        else:
            messages.append({"role": "user", "content": question})
    return messages


async def hold_same_conversation(policy: rlkit.Policy) -> None:
    messages: list[rlkit.Message] = [{"role": "user", "content": "begin with add"}]
    for question in ("and", "so", ""):
        reply = await policy.chat(messages, tools=[SAME_ADD])
        messages.append(reply.message)
        if reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": reply.tool_calls[0]["id"], "content": "3"})
        else:
            messages.append({"role": "user", "content": question})


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_has_the_tokens_of_chat(stream: bool) -> None:
    policy, expected = make_policy(), make_policy()
    messages = play(policy, lambda client: hold_conversation(client, stream=stream))
    asyncio.run(hold_same_conversation(expected))
    assert describe(policy.turns) == describe(expected.turns)
    assert [turn.parent for turn in policy.turns] == [None, 0, 1]
    assert "tool_calls" in messages[1]


def test_empty_thinking_is_kept_and_results_have_the_names_of_their_tools() -> None:
    shown = list[str]()

    class NamingChat(ByteChat):
        def render(self, messages: Sequence[rlkit.Message], tools: Sequence[rlkit.Tool] = ()) -> Prompt:
            shown.extend(message.get("name", "") for message in messages if message["role"] == "tool")
            return super().render(messages, tools)

    def call_add(prompt: str, *, seed: int) -> str:
        return '<think>\n\n</think>\n\n<tool_call>{"name": "add", "arguments": {}}</tool_call>'

    chat = NamingChat()
    policy = make_policy(chat=chat, sampler=ScriptedSampler(call_add, chat=chat))

    async def work(client: AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        for _ in range(2):
            message = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message
            assert message.tool_calls is not None
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
            messages += [message.model_dump(exclude_none=True), result]

    play(policy, work)
    assert [turn.parent for turn in policy.turns] == [None, 0]
    assert set(shown) == {"add"}


def test_a_changed_message_starts_a_segment() -> None:
    policy = make_policy()

    async def work(client: AsyncOpenAI) -> None:
        ask = {"role": "user", "content": "begin"}
        first = (await client.chat.completions.create(model="m", messages=[ask])).choices[0].message.content
        for said in (first, f"{first}!"):
            messages = [ask, {"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
            await client.chat.completions.create(model="m", messages=messages)

    play(policy, work)
    assert [turn.parent for turn in policy.turns] == [None, 0, None]


def test_a_stop_string_ends_a_reply() -> None:
    policy = make_policy()

    async def work(client: AsyncOpenAI) -> None:
        ask = {"role": "user", "content": "begin"}
        choice = (await client.chat.completions.create(model="m", messages=[ask], stop=["with"])).choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.content is not None
        assert choice.message.content.startswith("seen ")
        assert "with" not in choice.message.content
        reply = {"role": "assistant", "content": choice.message.content}
        await client.chat.completions.create(model="m", messages=[ask, reply, ask])

    play(policy, work)
    assert bytes(policy.turns[0].completion.tolist()).endswith(b"with")
    assert policy.turns[1].parent == 0


def test_tool_calls_of_two_turns_have_different_ids() -> None:
    async def work(client: AsyncOpenAI) -> set[str]:
        ask = [{"role": "user", "content": "begin with add"}]
        completions = [await client.chat.completions.create(model="m", messages=ask, tools=[ADD]) for _ in range(2)]
        return {call.id for done in completions for call in done.choices[0].message.tool_calls or ()}

    assert len(play(make_policy(), work)) == 2


def test_choices_are_turns() -> None:
    policy = make_policy()

    async def work(client: AsyncOpenAI) -> list[str | None]:
        messages = [{"role": "user", "content": "begin"}]
        completion = await client.chat.completions.create(model="m", messages=messages, n=3)
        assert completion.usage is not None
        assert completion.usage.completion_tokens == sum(len(turn.completion) for turn in policy.turns)
        assert completion.usage.prompt_tokens == len(policy.turns[0].prompt)
        return [choice.message.content for choice in completion.choices]

    assert len(set(play(policy, work))) == 3
    assert len(policy.turns) == 3


def test_tool_choice_none_offers_no_tools_and_reasoning_effort_has_no_effect() -> None:
    policy = make_policy()

    async def work(client: AsyncOpenAI) -> list[bool]:
        question: ChatCompletionMessageParam = {"role": "user", "content": "begin"}
        completions = [
            await client.chat.completions.create(
                model="m", messages=[question], tools=[ADD], tool_choice=choice, reasoning_effort="low", verbosity="low"
            )
            for choice in ("none", "auto")
        ]
        return [completion.choices[0].message.tool_calls is not None for completion in completions]

    assert play(policy, work) == [False, True]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"strange": 1}}, "strange"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]},
            "messages",
        ),
    ],
)
def test_a_request_for_what_cannot_be_had_is_an_error(settings: dict[str, Any], field: str) -> None:
    policy = make_policy()

    async def work(client: AsyncOpenAI) -> None:
        await client.chat.completions.create(
            **{"model": "m", "messages": [{"role": "user", "content": "begin"}], **settings}
        )

    with pytest.raises(openai.BadRequestError) as caught:
        play(policy, work)
    assert str(caught.value.param).startswith(field)
    assert not policy.turns


@pytest.mark.parametrize(
    ("limits", "code"),
    [(Limits(max_turns=0), "rollout_limit_reached"), (Limits(context_tokens=5), "context_length_exceeded")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_limits_are_errors_that_the_client_does_not_repeat(limits: Limits, code: str, stream: bool) -> None:
    async def work(client: AsyncOpenAI) -> None:
        messages = [{"role": "user", "content": "begin"}]
        reply: Any = await client.chat.completions.create(model="m", messages=messages, stream=stream)
        if stream:
            [_ async for _ in reply]

    with pytest.raises(openai.APIStatusError) as caught:  # nothing was sampled, so a stream has not opened either
        play(make_policy(limits=limits), work)
    assert caught.value.code == code


def test_an_endpoint_may_limit_the_turns() -> None:
    policy = make_policy()

    async def main() -> None:
        async with open_endpoint(policy, max_turns=2) as endpoint, connect(endpoint) as client:
            messages: list[Any] = [{"role": "user", "content": "begin"}]
            for turns in (1, 2):
                await client.chat.completions.create(model="m", messages=messages)
                assert (len(policy.turns), endpoint.limit) == (turns, None)
            with pytest.raises(openai.BadRequestError, match="all 2 turns") as caught:
                await client.chat.completions.create(model="m", messages=messages)
            assert caught.value.code == "rollout_limit_reached"
            assert endpoint.limit is not None

    asyncio.run(main())
    assert len(policy.turns) == 2


class FailingSampler(ScriptedSampler):
    calls = 0

    async def sample(self, *arguments: Any, **options: Any) -> Any:
        type(self).calls += 1
        raise ServiceError("the service is down", request_id="r1")


def test_a_failure_of_the_service_ends_the_rollout_whatever_the_client_does() -> None:
    policy = make_policy(sampler=FailingSampler(author, chat=ByteChat()))

    async def work(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "begin"}])

    with pytest.raises(ServiceError, match="r1"):
        play(policy, work)
    assert FailingSampler.calls == 1


def test_a_key_reaches_its_own_rollout_and_is_dead_afterwards() -> None:
    first, second = make_policy(), make_policy()

    async def ask(endpoint: Endpoint) -> None:
        async with connect(endpoint) as client:
            await client.models.list()
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "begin"}])

    async def main() -> None:
        async with first.endpoint() as one:
            async with second.endpoint() as two:
                assert (one.url, one.key == two.key) == (two.url, False)
                await ask(two)
            assert (len(first.turns), len(second.turns)) == (0, 1)
            with pytest.raises(openai.AuthenticationError):
                await ask(two)
            await ask(one)
        assert (len(first.turns), len(second.turns)) == (1, 1)
        with pytest.raises(openai.APIConnectionError):
            await ask(one)

    asyncio.run(main())


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

    policy = make_policy(sampler=Stuck(author, chat=ByteChat()))

    async def main() -> None:
        async with policy.endpoint() as endpoint:
            body = {"messages": [{"role": "user", "content": "begin"}], "stream": stream}
            async with httpx.AsyncClient(timeout=None) as client:
                url, headers = f"{endpoint.url}/chat/completions", {"Authorization": f"Bearer {endpoint.key}"}
                asking = asyncio.create_task(client.post(url, json=body, headers=headers))
                await waiting.wait()
                await asyncio.sleep(0.02)  # the stream has opened
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            async with asyncio.timeout(HANG_S):
                await cancelled.wait()

    asyncio.run(main())
    assert not policy.turns


class WaitingSampler(ScriptedSampler):
    """A sampler that does not answer; `waiting` is set when it is asked."""

    def __init__(self) -> None:
        super().__init__(author, chat=ByteChat())
        self.waiting = asyncio.Event()

    async def sample(self, *arguments: Any, **options: Any) -> Any:
        self.waiting.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_outlives_its_rollout_is_an_error(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    sampler = WaitingSampler()
    policy = make_policy(sampler=sampler)

    async def main() -> str:
        async with make_policy().endpoint(), httpx.AsyncClient() as client:  # the server goes on
            async with policy.endpoint() as endpoint:
                headers = {"Authorization": f"Bearer {endpoint.key}"}
                body = {"messages": [{"role": "user", "content": "begin"}], "stream": stream}
                url = f"{endpoint.url}/chat/completions"
                request = asyncio.create_task(client.post(url, json=body, headers=headers))
                await sampler.waiting.wait()
            return (await request).text

    assert '"message": "the rollout has ended"' in asyncio.run(main()).replace('":"', '": "')
    assert not policy.turns
    assert not caplog.records


def test_a_request_that_outlives_its_rollout_keeps_nothing_of_it() -> None:
    async def main() -> weakref.ref[RecordingPolicy]:
        sampler = WaitingSampler()
        policy = make_policy(sampler=sampler)
        async with httpx.AsyncClient() as client:
            async with policy.endpoint() as endpoint:
                body = {"messages": [{"role": "user", "content": "begin"}]}
                headers = {"Authorization": f"Bearer {endpoint.key}"}
                request = asyncio.create_task(
                    client.post(f"{endpoint.url}/chat/completions", json=body, headers=headers)
                )
                await sampler.waiting.wait()
            assert (await request).status_code == 400
        return weakref.ref(policy)

    policy = asyncio.run(main())
    gc.collect()
    assert policy() is None


def test_the_end_of_a_cancelled_rollout_is_its_cancellation() -> None:
    policy = make_policy(sampler=FailingSampler(author, chat=ByteChat()))

    async def work(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "begin"}])
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        play(policy, work)


def test_choices_before_a_limit_are_not_lost() -> None:
    policy = make_policy(limits=Limits(max_turns=2))

    async def work(client: AsyncOpenAI) -> int:
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        return len((await client.chat.completions.create(model="m", messages=messages, n=3)).choices)

    assert play(policy, work) == len(policy.turns) == 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"stop": ["x"] * 65}, "at most 64 items"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL_OF_900_LEVELS]}]}, "more than 200 levels deep"),
        ({"metadata": {"a": json.loads(900 * "[" + 900 * "]")}}, "more than 200 levels deep"),
    ],
)
def test_an_error_names_the_limit_that_a_request_exceeds(settings: dict[str, Any], reason: str) -> None:
    policy = make_policy()

    async def work(client: AsyncOpenAI) -> None:
        await client.chat.completions.create(
            **{"model": "m", "messages": [{"role": "user", "content": "begin"}], **settings}
        )

    with pytest.raises(openai.BadRequestError, match=reason):
        play(policy, work)


def test_each_choice_of_a_stream_ends_whatever_the_limit() -> None:
    policy = make_policy(limits=Limits(max_turns=2))

    async def work(client: AsyncOpenAI) -> tuple[set[int], set[int]]:
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        stream = await client.chat.completions.create(model="m", messages=messages, n=4, stream=True)
        choices = [choice async for chunk in stream for choice in chunk.choices]
        opened = {choice.index for choice in choices if choice.delta.role is not None}
        return opened, {choice.index for choice in choices if choice.finish_reason == "stop"}

    assert play(policy, work) == ({0, 1}, {0, 1})


@pytest.mark.parametrize(
    ("part", "count"),
    [("{}, ", 200_000), ("[], ", 200_000), (r'"\u007b\u007D", ', 200_000), ("1, ", 600_000), (r'"\u002C", ', 300_000)],
)
def test_a_body_of_very_many_objects_or_values_is_not_read_while_others_are_answered(
    monkeypatch: pytest.MonkeyPatch, part: str, count: int
) -> None:
    bodies = list[bytes]()

    def parse_body(body: bytes, model: type[Any]) -> Any:
        bodies.append(body)
        return parse(body, model)

    parse = http_responses.parse_body
    monkeypatch.setattr(http_responses, "parse_body", parse_body)
    small = b'{"messages": [{"role": "user", "content": "begin"}]}'

    async def main() -> list[httpx.Response]:
        async with make_policy().endpoint() as large, make_policy().endpoint() as other, httpx.AsyncClient() as client:
            contents = (f'{{"messages": [{part * count}{{}}]}}'.encode(), large.key), (small, other.key)
            return await asyncio.gather(
                *(
                    client.post(
                        f"{large.url}/chat/completions", content=body, headers={"Authorization": f"Bearer {key}"}
                    )
                    for body, key in contents
                )
            )

    rejection, answer = asyncio.run(main())
    assert (rejection.status_code, answer.status_code) == (413, 200)
    assert rejection.json()["error"]["type"] == "request_too_large"
    assert bodies == [small]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"messages": 1}', b"\xff", b'{"messages": [{"role": "user"}], "n": 1e99}']
)
def test_a_malformed_body_is_an_error(body: bytes) -> None:
    async def main() -> httpx.Response:
        async with make_policy().endpoint() as endpoint, httpx.AsyncClient() as client:
            url, headers = f"{endpoint.url}/chat/completions", {"Authorization": f"Bearer {endpoint.key}"}
            return await client.post(url, content=body, headers=headers)

    response = asyncio.run(main())
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


class StrictChat(ByteChat):
    """A format that accepts one system message, and fails in its own way otherwise."""

    def __init__(self, error: type[Exception] = RuntimeError) -> None:
        super().__init__()
        self.error = error

    def render(self, messages: Any, tools: Any = ()) -> Any:
        if [message["role"] for message in messages].count("system") > 1:
            raise self.error("one system message, please")
        return super().render(messages, tools)


def test_system_messages_at_the_start_are_joined() -> None:
    async def work(client: AsyncOpenAI) -> None:
        roles = ("system", "developer", "user")
        messages: list[Any] = [{"role": role, "content": role} for role in roles]
        await client.chat.completions.create(model="m", messages=messages)

    policy = make_policy(chat=StrictChat())
    play(policy, work)
    text = bytes(token for token in policy.turns[0].prompt.tokens.tolist() if token < 256)
    assert b"system\n\ndeveloper" in text


@pytest.mark.parametrize("error", [RuntimeError, ValueError, rlkit.EnvironmentFault])
def test_messages_that_the_format_rejects_fail_the_episode_whatever_the_agent_does(error: type[Exception]) -> None:
    async def work(client: AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": role, "content": role} for role in ("system", "user", "system", "user")]
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model="m", messages=messages)

    with pytest.raises(rlkit.EnvironmentFault, match="one system message, please"):
        play(make_policy(chat=StrictChat(error)), work)


def test_only_an_endpoint_with_a_host_is_reached_from_other_interfaces() -> None:
    address = "127.0.0.2"  # on Linux an address of this machine, which a server on 127.0.0.1 does not have

    async def try_endpoint(host: str | None) -> int:
        async with open_endpoint(make_policy(), host=host) as endpoint, httpx.AsyncClient() as client:
            port = httpx.URL(endpoint.url).port
            assert endpoint.root == f"http://{host or '127.0.0.1'}:{port}"
            headers = {"authorization": f"Bearer {endpoint.key}"}
            return (await client.get(f"http://{address}:{port}/v1/models", headers=headers)).status_code

    assert asyncio.run(try_endpoint(address)) == 200
    with pytest.raises(httpx.ConnectError):
        asyncio.run(try_endpoint(None))


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    async def ask(client: AsyncOpenAI) -> float:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "begin"}])
        return 1.0

    assert asyncio.run(rlkit.CallableEnv(ask).rollout(make_policy())) == 1.0
