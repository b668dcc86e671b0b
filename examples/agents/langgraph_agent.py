"""Train an agent of LangGraph that has a tool.

uv run --with langgraph==1.2.24 --with langchain-openai==1.7.4 rlkit train examples/agents/langgraph_agent.yaml
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

import rlkit

if TYPE_CHECKING:
    from openai import AsyncOpenAI


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


async def solve(client: AsyncOpenAI, *, a: int, b: int) -> float:
    model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key, max_retries=0)
    agent = create_react_agent(model, [multiply], prompt="Answer with a number. Use the tool.")
    question = {"messages": [("user", f"What is {a} times {b}?")]}
    state = await agent.ainvoke(question, {"recursion_limit": 8})
    return float(str(a * b) in str(state["messages"][-1].content))


def products(count: int = 64, seed: int = 0) -> list[rlkit.CallableEnv]:
    """Return products of two numbers of two digits."""
    rng = random.Random(seed)
    pairs = [(rng.randint(11, 99), rng.randint(11, 99)) for _ in range(count)]
    return [rlkit.CallableEnv(partial(solve, a=a, b=b), task_id=f"{a}x{b}") for a, b in pairs]
