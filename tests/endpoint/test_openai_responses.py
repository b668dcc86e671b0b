"""OpenAI's own client of responses at the endpoint of a rollout: its conversations are those of `policy.chat`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import rlkit
from rlkit.chat.format import ChatFormat
from rlkit.endpoint import Endpoint
from rlkit.errors import ServiceError
from rlkit.policy import Limits
from rlkit.testing import ByteChat, ScriptedPolicy, ScriptedSampler
from rlkit.types import Turn

SAME_ADD: rlkit.Tool = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
ADD: dict[str, Any] = {"type": "function", **SAME_ADD, "strict": True}

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'
SCRIPT = (
    f"<think>\nhm\n</think>\n\nTwo sums. {CALL}{CALL.replace('1', '7')}",
    f"<think>\nagain\n</think>\n\n{CALL}",
    "Then 3.",
    "<think>\n\n</think>\n\nYes.",
    "No.",
)
"""Replies with reasoning, text and parallel calls, and without each of them."""

QUESTIONS = ("", "", "and?", "so?", "")
"""The user's answers to the replies; calls are answered by their outputs."""

EVENTS = TypeAdapter[Any](ResponseStreamEvent, config={"defer_build": True})

type Item = dict[str, Any]


def make_policy(
    replies: Sequence[str] | Callable[[str], str] = SCRIPT,
    *,
    chat: ChatFormat | None = None,
    limits: Limits = Limits(),
    max_tokens: int = 1000,
) -> ScriptedPolicy:
    return ScriptedPolicy(replies, chat=chat, limits=limits, max_tokens=max_tokens)


def play[T](policy: ScriptedPolicy, work: Callable[[AsyncOpenAI], Awaitable[T]]) -> T:
    async def main() -> T:
        async with policy.endpoint() as endpoint, connect(endpoint) as client:
            return await work(client)

    return asyncio.run(main())


def connect(endpoint: Endpoint) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key)


def describe(turns: tuple[Turn, ...]) -> list[object]:
    return [(turn.prompt.tokens.tolist(), turn.completion.tolist(), turn.parent, turn.stop) for turn in turns]


async def request(client: AsyncOpenAI, *, stream: bool = False, **settings: Any) -> Response:
    if not stream:
        return await client.responses.create(model="any", **settings)
    async with client.responses.stream(model="any", **settings) as events:
        return [event async for event in events][-1].response  # type: ignore[union-attr]  # the last has one


def send_back(response: Response) -> list[Item]:
    return [item.model_dump(exclude_none=True) for item in response.output]


def answer(response: Response, question: str) -> list[Item]:
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in response.output
        if item.type == "function_call"
    ]
    return outputs or [{"role": "user", "content": [{"type": "input_text", "text": question}]}]


async def hold_conversation(client: AsyncOpenAI, *, stream: bool, edit: Callable[[Item], Item] = lambda i: i) -> None:
    """Hold the conversation of `SCRIPT` as clients do that keep their history themselves."""
    items: list[Item] = [{"role": "user", "content": "begin"}]
    for question in QUESTIONS:
        response = await request(client, stream=stream, input=items, instructions="Be brief.", tools=[ADD], store=False)
        items += [*map(edit, send_back(response)), *answer(response, question)]


async def hold_stored_conversation(client: AsyncOpenAI, *, stream: bool) -> None:
    """Hold the conversation of `SCRIPT` as clients do that name the previous response."""
    new: str | list[Item] = "begin"
    previous: str | None = None
    for question in QUESTIONS:
        response = await request(
            client, stream=stream, input=new, instructions="Be brief.", tools=[ADD], previous_response_id=previous
        )
        new, previous = answer(response, question), response.id


async def hold_same_conversation(policy: rlkit.Policy) -> None:
    messages: list[rlkit.Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "begin"},
    ]
    for question in QUESTIONS:
        reply = await policy.chat(messages, tools=[SAME_ADD])
        outputs: list[rlkit.Message] = [
            {"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in reply.tool_calls
        ]
        messages += [reply.message, *(outputs or [{"role": "user", "content": question}])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold", [hold_conversation, hold_stored_conversation])
def test_a_conversation_has_the_tokens_of_chat(hold: Callable[..., Awaitable[None]], stream: bool) -> None:
    policy, expected = make_policy(), make_policy()
    play(policy, lambda client: hold(client, stream=stream))
    asyncio.run(hold_same_conversation(expected))
    assert describe(policy.turns) == describe(expected.turns)
    assert [turn.parent for turn in policy.turns] == [None, 0, 1, 2, 3]


def without(*names: str) -> Callable[[Item], Item]:
    return lambda item: {name: value for name, value in item.items() if name not in names}


@pytest.mark.parametrize("edit", [without("id"), without("status"), lambda item: {**item, "phase": "commentary"}])
def test_items_may_lose_what_is_not_their_content(edit: Callable[[Item], Item]) -> None:
    policy = make_policy()
    play(policy, lambda client: hold_conversation(client, stream=False, edit=edit))
    assert [turn.parent for turn in policy.turns] == [None, 0, 1, 2, 3]


@pytest.mark.parametrize(("include", "parent"), [(["reasoning.encrypted_content"], 0), ([], None)])
def test_reasoning_is_kept_as_text_or_opaque_text(include: Any, parent: int | None) -> None:
    policy = make_policy()

    async def work(client: AsyncOpenAI) -> None:
        first = await request(client, input="begin", include=include, tools=[ADD])
        items = [without("content")(item) if item["type"] == "reasoning" else item for item in send_back(first)]
        ask = {"role": "user", "content": "begin"}
        await request(client, input=[ask, *items, *answer(first, "")], include=include, tools=[ADD])

    play(policy, work)
    assert policy.turns[1].parent == parent


def test_replies_without_a_message_between_them_stay_apart() -> None:
    script = ["one", CALL, "<think>two", "<think>more</think>three", "four"]
    policy, expected = make_policy(script), make_policy(script)

    async def work(client: AsyncOpenAI) -> None:
        items: list[Item] = [{"role": "user", "content": "begin"}]
        for _ in script:
            items += send_back(await request(client, input=items))

    async def hold_same() -> None:
        messages: list[rlkit.Message] = [{"role": "user", "content": "begin"}]
        for _ in script:
            messages.append((await expected.chat(messages)).message)

    play(policy, work)
    asyncio.run(hold_same())
    assert describe(policy.turns) == describe(expected.turns)


def test_outputs_may_stand_between_parallel_calls() -> None:
    policy = make_policy([CALL + CALL, "done"])

    async def work(client: AsyncOpenAI) -> None:
        first = await request(client, input="begin", tools=[ADD])
        pairs = zip(send_back(first), answer(first, ""), strict=True)
        ask = {"role": "user", "content": "begin"}
        await request(client, input=[ask, *[item for pair in pairs for item in pair]], tools=[ADD])

    play(policy, work)
    assert policy.turns[1].parent == 0


@pytest.mark.parametrize("role", ["user", "developer"])
def test_a_message_between_parallel_calls_starts_a_segment(role: str) -> None:
    policy = make_policy([CALL + CALL, "done"])

    async def work(client: AsyncOpenAI) -> None:
        first = await request(client, input="begin", tools=[ADD])
        calls, outputs = send_back(first), answer(first, "")
        between = [calls[0], outputs[0], {"role": role, "content": "wait"}, calls[1], outputs[1]]
        await request(client, input=[{"role": "user", "content": "begin"}, *between], tools=[ADD])

    play(policy, work)
    assert policy.turns[1].parent is None


def test_instructions_are_not_carried_over() -> None:
    policy = make_policy(["one", "two", "three"])

    async def work(client: AsyncOpenAI) -> None:
        first = await request(client, input="begin", instructions="Be brief.")
        await request(client, input="on", instructions="Be long.", previous_response_id=first.id)
        await request(client, input="on", previous_response_id=first.id)

    play(policy, work)
    assert ["brief" in prompt for prompt in policy.prompts] == [True, False, False]
    assert ["Be long." in prompt for prompt in policy.prompts] == [False, True, False]
    assert all("one" in prompt for prompt in policy.prompts[1:])


@pytest.mark.parametrize("store", [False, True])
def test_a_response_can_be_continued_unless_it_is_not_stored(store: bool) -> None:
    async def work(client: AsyncOpenAI) -> None:
        first = await request(client, input="begin", store=store)
        await request(client, input="on", previous_response_id=first.id)

    policy = make_policy(["one", "two"])
    if store:
        play(policy, work)
    else:
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            play(policy, work)
    assert len(policy.turns) == 1 + store


PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Edit.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE"},
}


def write_call(name: str, arguments: Mapping[str, object]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (write_call("patch", {"input": 'a\n"b"'}), ("custom_tool_call", "patch", None, 'a\n"b"')),
        (write_call("patch", {"file": "a"}), ("function_call", "patch", None, '{"file": "a"}')),
        (write_call("crew__call", {"input": "a"}), ("function_call", "call", "crew", '{"input": "a"}')),
        (write_call("unknown", {}), ("function_call", "unknown", None, "{}")),
    ],
)
def test_calls_of_every_kind_of_tool_are_kept(call: str, shape: tuple[object, ...], stream: bool) -> None:
    policy = make_policy([call, "done"])
    namespace = {"type": "namespace", "name": "crew", "description": "", "tools": [{**ADD, "name": "call"}]}
    tools = [PATCH, namespace, {"type": "web_search"}]

    async def work(client: AsyncOpenAI) -> tuple[object, ...]:
        first = await request(client, input="begin", tools=tools, stream=stream)
        (item,) = first.output
        assert item.type in {"custom_tool_call", "function_call"}
        output = {"type": f"{item.type}_output", "call_id": item.call_id, "output": [{"type": "input_text", "text": "3"}]}  # fmt: skip  # noqa: E501
        ask = {"role": "user", "content": "begin"}
        await request(client, input=[ask, *send_back(first), output], tools=tools, stream=stream)
        return item.type, item.name, item.namespace, getattr(item, "input", None) or item.arguments

    assert play(policy, work) == shape
    assert policy.turns[1].parent == 0
    assert "start: LINE" in policy.prompts[0]
    assert "web_search" not in policy.prompts[0]


def test_tool_choice_none_offers_no_tools() -> None:
    policy = make_policy(["done"])
    play(policy, lambda client: request(client, input="begin", tools=[ADD], tool_choice="none"))
    assert "add" not in policy.prompts[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_is_cut_is_incomplete(stream: bool) -> None:
    policy = make_policy(["one two three"])
    response = play(policy, lambda client: request(client, input="begin", max_output_tokens=7, stream=stream))
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output_text == "one two"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(policy.turns[0].prompt), 7)


def test_codex_parameters_are_accepted() -> None:
    settings: Any = {
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
        "truncation": "disabled",
        "parallel_tool_calls": True,
        "temperature": 0.5,
        "extra_body": {"client_metadata": {"a": "b"}},
    }
    policy = make_policy(["done"])
    response = play(policy, lambda client: request(client, input="begin", **settings))
    assert policy.sampler.requests[0].sampling.temperature == 0.5
    assert response.metadata == {"a": "b"}


SETTINGS: Sequence[Mapping[str, Any]] = (
    {"input": "begin", "tools": [ADD, PATCH], "include": ["reasoning.encrypted_content"]},
    {"input": "begin", "max_output_tokens": 5, "instructions": "Be brief."},
)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("reply", [*SCRIPT, write_call("patch", {"input": "a"}), ""])
def test_events_have_the_types_of_the_sdk(settings: Mapping[str, Any], reply: str) -> None:
    async def main() -> list[Any]:
        async with make_policy([reply]).endpoint() as endpoint:
            return await stream_events(endpoint, settings)

    events = asyncio.run(main())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"] != []
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in done]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]


async def stream_events(endpoint: Endpoint, settings: Mapping[str, Any]) -> list[Any]:
    async with httpx.AsyncClient() as client:
        url, headers = f"{endpoint.url}/responses", {"Authorization": f"Bearer {endpoint.key}"}
        response = await client.post(url, headers=headers, json={**settings, "stream": True})
    lines = [line for line in response.text.splitlines() if line and not line.startswith(":")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert lines[::2] == [f"event: {event['type']}" for event in events]
    return events


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "code_interpreter", "container": "c"}]}, "tools"),
        ({"extra_body": {"strange": 1}}, "strange"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "/etc/passwd"}]}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "add", "arguments": "[1"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "rlkit:é"}]}, "input"),
    ],
)
def test_a_request_for_what_cannot_be_had_is_an_error(settings: Mapping[str, Any], field: str) -> None:
    policy = make_policy()

    async def work(client: AsyncOpenAI) -> None:
        await client.responses.create(**{"model": "m", "input": "begin", "stream": field == "tool_choice", **settings})

    with pytest.raises(openai.BadRequestError) as caught:
        play(policy, work)
    assert str(caught.value.param).startswith(field)
    assert not policy.turns


@pytest.mark.parametrize(
    "tools",
    [
        [ADD, {"type": "custom", "name": "add"}],
        [{**ADD, "name": "a__add"}, {"type": "namespace", "name": "a", "description": "", "tools": [ADD]}],
    ],
)
def test_two_tools_of_one_name_are_an_error_that_names_them(tools: list[Any]) -> None:
    policy = make_policy()

    async def work(client: AsyncOpenAI) -> None:
        await request(client, input="begin", tools=tools)

    with pytest.raises(openai.BadRequestError, match=r"two tools have the name '(a__)?add'") as caught:
        play(policy, work)
    assert (caught.value.param, policy.turns) == ("tools", ())


def test_an_empty_input_is_an_error() -> None:
    with pytest.raises(openai.BadRequestError, match="at least one message"):
        play(make_policy(), lambda client: request(client, input=[]))


@pytest.mark.parametrize(
    ("limits", "code", "words"),
    [
        (Limits(max_turns=0), "rollout_limit_reached", "turns"),
        (Limits(context_tokens=5), "context_length_exceeded", "maximum context length"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_limits_are_errors_that_the_client_does_not_repeat(limits: Limits, code: str, words: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        play(make_policy(limits=limits), lambda client: request(client, input="begin", stream=stream))
    assert caught.value.code == code


class FailingSampler(ScriptedSampler):
    calls = 0

    async def sample(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        await asyncio.sleep(0.1)
        raise ServiceError("the service is down", request_id="r1")


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_service_ends_the_rollout_whatever_the_client_does(stream: bool) -> None:
    policy = make_policy()
    policy.sampler = sampler = FailingSampler(lambda prompt, *, seed: "", chat=ByteChat())

    async def work(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.APIError) as caught:
            await request(client, input="begin", stream=stream)
        assert "the service is down" in str(caught.value)
        with pytest.raises(openai.InternalServerError, match="the service is down"):  # some clients repeat requests
            await request(client, input="begin", stream=stream)

    with pytest.raises(ServiceError, match="r1"):
        play(policy, work)
    assert sampler.calls == 1


def test_a_stream_that_has_begun_ends_with_a_failed_response() -> None:
    policy = make_policy()
    policy.sampler = FailingSampler(lambda prompt, *, seed: "", chat=ByteChat())

    async def main() -> list[Any]:
        events: list[Any] = []
        with pytest.raises(ServiceError):
            async with policy.endpoint() as endpoint:
                events = await stream_events(endpoint, {"input": "begin"})
        return events

    events = asyncio.run(main())
    for event in events:
        EVENTS.validate_python(event)
    assert [event["type"] for event in events[2:]] == ["error", "response.failed"]
    assert events[3]["response"]["error"]["code"] == "server_error"
    assert events[3]["response"]["id"] == events[0]["response"]["id"]


def test_a_websocket_is_refused_with_the_status_after_which_codex_uses_http(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> int:
        async with ScriptedPolicy(["fine"]).endpoint() as endpoint, httpx.AsyncClient() as client:
            headers = {"connection": "Upgrade", "upgrade": "websocket", "authorization": f"Bearer {endpoint.key}"}
            return (await client.get(f"{endpoint.url}/responses", headers=headers)).status_code

    assert asyncio.run(main()) == 426
    assert not [record for record in caplog.records if record.name == "uvicorn.error"]


def test_a_wrong_key_is_an_error() -> None:
    async def main() -> None:
        async with make_policy().endpoint() as endpoint, AsyncOpenAI(base_url=endpoint.url, api_key="rlkit-no") as client:  # fmt: skip  # noqa: E501
            with pytest.raises(openai.AuthenticationError) as caught:
                await request(client, input="begin")
            assert caught.value.code == "invalid_api_key"

    asyncio.run(main())


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b"{}", b'{"input": 1}', b'{"input": [1]}', b'{"input": [{"role": "user"}]}', b"\xff",
     b'{"input": "a", "tools": [{}]}', b'{"input": "a", "max_output_tokens": 1e99}', b'{"input": [{"type": []}]}'],
)  # fmt: skip
def test_a_malformed_body_is_an_error(body: bytes) -> None:
    async def main() -> httpx.Response:
        async with make_policy().endpoint() as endpoint, httpx.AsyncClient() as client:
            url, headers = f"{endpoint.url}/responses", {"Authorization": f"Bearer {endpoint.key}"}
            return await client.post(url, content=body, headers=headers)

    response = asyncio.run(main())
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "field", ['"metadata": {"a": NaN}', '"tools": [{"type": "function", "name": "f", "x": 1e999}]']
)
def test_a_number_that_is_not_finite_does_not_cost_the_client_its_turn(field: str) -> None:
    policy = make_policy()

    async def main() -> httpx.Response:
        async with policy.endpoint() as endpoint, httpx.AsyncClient() as client:
            url, headers = f"{endpoint.url}/responses", {"Authorization": f"Bearer {endpoint.key}"}
            return await client.post(url, content=f'{{"input": "begin", {field}}}', headers=headers)

    assert asyncio.run(main()).json()["status"] == "completed"
    assert len(policy.turns) == 1
