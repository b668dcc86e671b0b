"""Vendors' clients, unmodified, on the embedded engine: a model that can call a tool learns through the endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import rlkit
from rlkit.rollout.recorder import RecordingPolicy
from tests.calling_model import check_learning, check_training, teach_agent, write_call

QUESTION = "Add up 2, 3, 4 and 5."
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


def write_reply(prompt: str, *, seed: int, is_right: bool) -> str:
    """Add two pairs at once, then the sums, then answer."""
    if prompt.count("<tool_response>") == 0:
        return write_call("add", a=2, b=3) + "\n" + write_call("add", a=4, b=5)
    if prompt.count("<tool_response>") == 2:
        return write_call("add", a=5, b=9)
    return "The sum is 14." if is_right else "I do not know."


def add(arguments: Any) -> str:
    return str(arguments["a"] + arguments["b"])


MAX_TURNS = 8
"""Turns of an agent at most: a model in training may call its tool for ever."""


async def ask_by_chat(policy: rlkit.Policy) -> str:
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with policy.endpoint() as endpoint, openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key) as client:
        for _ in range(MAX_TURNS):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=[tool])
            message = completion.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                assert call.type == "function"
                result = add(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def ask_by_responses(policy: rlkit.Policy) -> str:
    tool: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    async with policy.endpoint() as endpoint, openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key) as client:
        for _ in range(MAX_TURNS):
            async with client.responses.stream(model="policy", input=items, tools=[tool]) as stream:
                response = await stream.get_final_response()
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            for call in calls:
                output = add(json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    return ""


async def ask_by_messages(policy: rlkit.Policy) -> str:
    tool: Any = {"name": "add", "input_schema": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with (
        policy.endpoint() as endpoint,
        anthropic.AsyncAnthropic(base_url=endpoint.root, api_key=endpoint.key) as client,
    ):
        for _ in range(MAX_TURNS):
            async with client.messages.stream(
                model="policy", max_tokens=100, messages=messages, tools=[tool]
            ) as stream:
                message = await stream.get_final_message()
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in message.content if block.type == "text")
            messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": add(call.input)} for call in calls]
            messages.append({"role": "user", "content": results})
    return ""


class Sums(rlkit.Env):
    def __init__(self, ask: Any) -> None:
        self.ask = ask

    async def rollout(self, policy: rlkit.Policy) -> float:
        return float("14" in await self.ask(policy))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "check"),
    [(ask_by_chat, check_learning), (ask_by_responses, check_training), (ask_by_messages, check_training)],
)
def test_a_model_is_trained_on_its_calls(
    ask: Any, check: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
    rewards = list[float]()

    def play(policy: RecordingPolicy) -> None:
        rewards.append(asyncio.run(Sums(ask).rollout(policy)))

    authors = [partial(write_reply, is_right=is_right) for is_right in (True, False)]
    model = teach_agent(tmp_path / "model", play, authors)
    assert rewards == [1.0, 0.0]
    check(model, Sums(ask))
