"""Clients of the endpoint's three protocols, for conversations that no vendor's client would have."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, override

import anthropic
import httpx
import openai

from rlkit.endpoint import Endpoint

PARAMETERS = {"type": "object", "properties": {}}

type Item = dict[str, Any]
"""A message, or an item of OpenAI's responses."""


class Wire(Protocol):
    """A protocol: its items, and its requests."""

    path: str
    tool: ClassVar[Mapping[str, Any]]

    def make_body(self, items: Sequence[Item], *, tools: bool, stream: bool) -> dict[str, Any]:
        """Return the body of a request."""
        ...

    def make_results(self, items: Sequence[Item]) -> list[Item]:
        """Return results of the tools that the last reply calls; none if it calls none."""
        ...

    def drop_thinking(self, items: Sequence[Item]) -> list[Item]:
        """Return the conversation as a client sends it that keeps no thinking."""
        ...

    async def ask(self, endpoint: Endpoint, items: Sequence[Item], *, tools: bool, stream: bool, choices: int) -> Any:
        """Send a request by the vendor's client, and return the items of the reply."""
        ...


def make_client(timeout_s: float = 60) -> httpx.AsyncClient:
    """Return a client that reads no certificates, which would take most of the time."""
    return httpx.AsyncClient(verify=False, timeout=timeout_s)


def make_openai(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0, http_client=make_client())


def make_user_message(text: str) -> Item:
    return {"role": "user", "content": text}


class Chat(Wire):
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"
    tool: ClassVar[Mapping[str, Any]] = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}

    @override
    def make_body(self, items: Sequence[Item], *, tools: bool, stream: bool) -> dict[str, Any]:
        return {"model": "policy", "messages": items, "stream": stream, **({"tools": [self.tool]} if tools else {})}

    @override
    def make_results(self, items: Sequence[Item]) -> list[Item]:
        calls = items[-1].get("tool_calls", []) if items else []
        return [{"role": "tool", "tool_call_id": call["id"], "content": "result"} for call in calls]

    @override
    def drop_thinking(self, items: Sequence[Item]) -> list[Item]:
        return [{name: value for name, value in item.items() if name != "reasoning_content"} for item in items]

    @override
    async def ask(self, endpoint: Endpoint, items: Sequence[Item], *, tools: bool, stream: bool, choices: int) -> Any:
        body = self.make_body(items, tools=tools, stream=stream)
        async with make_openai(endpoint) as client:
            answer: Any = await client.chat.completions.create(**body, n=choices)
            if stream:
                return [await join_chunks(answer)]
            return [answer.choices[0].message.model_dump(exclude_none=True)]


async def join_chunks(stream: AsyncIterator[Any]) -> Item:
    """Return the message of the first choice of a stream."""
    message: Item = {"role": "assistant"}
    async for chunk in stream:
        for choice in chunk.choices:
            if choice.index:
                continue
            for name, value in choice.delta.model_dump(exclude_none=True).items():
                if name == "tool_calls":
                    calls = message.setdefault("tool_calls", [])
                    for call in value:
                        place = call.pop("index")
                        if place == len(calls):
                            calls.append(call)
                        else:
                            calls[place]["function"]["arguments"] += call["function"]["arguments"]
                elif name in ("content", "reasoning_content"):
                    message[name] = message.get(name, "") + value
    return message


class Responses(Wire):
    """OpenAI's responses."""

    path = "/v1/responses"
    tool: ClassVar[Mapping[str, Any]] = {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False}

    @override
    def make_body(self, items: Sequence[Item], *, tools: bool, stream: bool) -> dict[str, Any]:
        return {"model": "policy", "input": items, "stream": stream, **({"tools": [self.tool]} if tools else {})}

    @override
    def make_results(self, items: Sequence[Item]) -> list[Item]:
        answered = {item["call_id"] for item in items if item.get("type") == "function_call_output"}
        calls = [item["call_id"] for item in items if item.get("type") == "function_call"]
        return [
            {"type": "function_call_output", "call_id": call, "output": "result"}
            for call in calls
            if call not in answered
        ]

    @override
    def drop_thinking(self, items: Sequence[Item]) -> list[Item]:
        return [item for item in items if item.get("type") != "reasoning"]

    @override
    async def ask(self, endpoint: Endpoint, items: Sequence[Item], *, tools: bool, stream: bool, choices: int) -> Any:
        body = self.make_body(items, tools=tools, stream=stream)
        async with make_openai(endpoint) as client:
            answer: Any = await client.responses.create(**body)
            if not stream:
                return [item.model_dump(exclude_none=True) for item in answer.output]
            return [
                event.item.model_dump(exclude_none=True)
                async for event in answer
                if event.type == "response.output_item.done"
            ]


class Messages(Wire):
    """Anthropic's messages."""

    path = "/v1/messages"
    tool: ClassVar[Mapping[str, Any]] = {"name": "f", "input_schema": PARAMETERS}

    @override
    def make_body(self, items: Sequence[Item], *, tools: bool, stream: bool) -> dict[str, Any]:
        body = {"model": "policy", "max_tokens": 60, "messages": items}
        return {**body, **({"stream": True} if stream else {}), **({"tools": [self.tool]} if tools else {})}

    @override
    def make_results(self, items: Sequence[Item]) -> list[Item]:
        blocks = items[-1]["content"] if items else []
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "result"}
            for block in blocks
            if isinstance(block, dict) and block["type"] == "tool_use"
        ]
        return [{"role": "user", "content": results}] if results else []

    @override
    def drop_thinking(self, items: Sequence[Item]) -> list[Item]:
        def is_kept(block: object) -> bool:
            return not (isinstance(block, dict) and block["type"] == "thinking")

        return [
            {**item, "content": list(filter(is_kept, item["content"]))} if isinstance(item["content"], list) else item
            for item in items
        ]

    @override
    async def ask(self, endpoint: Endpoint, items: Sequence[Item], *, tools: bool, stream: bool, choices: int) -> Any:
        body = self.make_body(items, tools=tools, stream=False)
        async with anthropic.AsyncAnthropic(
            base_url=endpoint.root,
            api_key=endpoint.key,
            max_retries=0,
            http_client=anthropic.DefaultAsyncHttpxClient(verify=False),
        ) as client:
            if stream:
                async with client.messages.stream(**body) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**body)
        return [{"role": "assistant", "content": json.loads(message.model_dump_json(exclude_none=True))["content"]}]


WIRES: Mapping[str, Wire] = {"chat": Chat(), "responses": Responses(), "messages": Messages()}


async def leave(wire: Wire, endpoint: Endpoint, body: Mapping[str, Any], *, within: bool) -> None:
    """Send a request, and close the connection within its stream, or before its response."""
    headers = {"Authorization": f"Bearer {endpoint.key}", "x-api-key": endpoint.key}
    try:
        async with (
            make_client(timeout_s=60 if within else 0.001) as client,
            client.stream("POST", f"{endpoint.root}{wire.path}", json=body, headers=headers) as stream,
        ):
            await anext(stream.aiter_bytes())
    except httpx.TimeoutException:
        assert not within
