"""Train an agent of the OpenAI Agents SDK that has a tool.

uv run --with openai-agents==0.24.0 rlkit train examples/agents/openai_agents.yaml
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

import rlkit

if TYPE_CHECKING:
    from openai import AsyncOpenAI

set_tracing_disabled(disabled=True)


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


async def solve(client: AsyncOpenAI, *, a: int, b: int) -> float:
    agent = Agent(
        name="calculator",
        instructions="Answer with a number. Use the tool.",
        model=OpenAIChatCompletionsModel(model="policy", openai_client=client),
        tools=[function_tool(multiply)],
    )
    result = await Runner.run(agent, f"What is {a} times {b}?", max_turns=4)
    return float(str(a * b) in str(result.final_output))


def products(count: int = 64, seed: int = 0) -> list[rlkit.CallableEnv]:
    """Return products of two numbers of two digits."""
    rng = random.Random(seed)
    pairs = [(rng.randint(11, 99), rng.randint(11, 99)) for _ in range(count)]
    return [rlkit.CallableEnv(partial(solve, a=a, b=b), task_id=f"{a}x{b}") for a, b in pairs]
