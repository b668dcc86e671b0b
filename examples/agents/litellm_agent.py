"""Train an agent that is a loop around `litellm`: it asks, runs the tool, and asks again.

uv run --with 'litellm[mcp]==1.106.2' rlkit train examples/agents/litellm_agent.yaml
"""

from __future__ import annotations

import json
import os
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import rlkit

if TYPE_CHECKING:
    from openai import AsyncOpenAI

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise the import downloads a table of prices

import litellm

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
MULTIPLY = {"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": NUMBERS}}


async def solve(client: AsyncOpenAI, *, a: int, b: int) -> float:
    messages: list[Any] = [{"role": "user", "content": f"What is {a} times {b}? Use the tool."}]
    for _ in range(4):
        completion = await litellm.acompletion(
            "openai/policy", messages, tools=[MULTIPLY], base_url=str(client.base_url), api_key=client.api_key
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return float(str(a * b) in (message.content or ""))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": run_tool(call.function.arguments)}
            for call in message.tool_calls
        ]
    return 0.0


def run_tool(arguments: str) -> str:
    try:
        return str(int(json.loads(arguments)["a"]) * int(json.loads(arguments)["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def products(count: int = 64, seed: int = 0) -> list[rlkit.CallableEnv]:
    """Return products of two numbers of two digits."""
    rng = random.Random(seed)
    pairs = [(rng.randint(11, 99), rng.randint(11, 99)) for _ in range(count)]
    return [rlkit.CallableEnv(partial(solve, a=a, b=b), task_id=f"{a}x{b}") for a, b in pairs]
