"""Agents of frameworks at the endpoint of a rollout, unmodified: each calls a tool twice and answers.

Frameworks that are not among the locked packages are laid over the environment, see `.ci/run`.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rlkit
from rlkit.policy import Limits
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.tools.audit import audit, audit_group
from rlkit.types import Group, Sampling
from tests.builders import episode
from tests.test_examples import load

FACTORS = re.compile(r"What is (\d+) times (\d+)\?")
CALLS = 2


def call_the_tool_then_answer(prompt: str, *, seed: int) -> str:
    factors = FACTORS.search(prompt)
    assert factors, prompt
    a, b = int(factors[1]), int(factors[2])
    if prompt.count("<tool_call>") < CALLS:
        return f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    assert prompt.count(str(a * b)) == CALLS, "the results of the tool are in the conversation"
    return f"It is {a * b}."


def make_policy(limits: Limits = Limits()) -> RecordingPolicy:
    chat = ByteChat()
    sampler = ScriptedSampler(call_the_tool_then_answer, chat=chat)
    sampling = Sampling(max_tokens=200)
    return RecordingPolicy(sampler=lambda: sampler, chat=chat, sampling=sampling, seed=lambda turn: turn, limits=limits)


def check_record(policy: RecordingPolicy) -> None:
    """Check that the rollout is one conversation, and that each sampled token is trained exactly once."""
    assert [turn.parent for turn in policy.turns] == [None, 0, 1]
    group = Group("products", "task", 0, (episode(1.0, turns=policy.turns),))
    report = asyncio.run(audit_group(group))
    assert report.mismatch is None
    assert report.tokens == sum(len(turn.completion) for turn in policy.turns)


@pytest.mark.parametrize(
    ("example", "package"),
    [
        ("openai_agents", "agents.run"),
        ("langgraph_agent", "langgraph"),
        ("litellm_agent", "mcp"),
    ],  # litellm needs mcp for tools
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*ReadOnly:UserWarning")
def test_an_agent_of_a_framework_calls_tools(example: str, package: str) -> None:
    pytest.importorskip(package)
    make_tasks: Any = load(f"examples/agents/{example}.py:products")
    policy = make_policy()
    assert asyncio.run(make_tasks(count=1)[0].rollout(policy)) == 1.0
    check_record(policy)


@pytest.mark.parametrize(
    ("example", "package"),
    [("openai_agents", "agents.run"), ("langgraph_agent", "langgraph"), ("litellm_agent", "mcp")],
)
def test_an_example_of_an_agent_trains(example: str, package: str, byte_model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip(package)
    small = [f"model={byte_model_dir}", "steps=1", "batch.groups=2", "batch.group_size=2", "sampling.max_tokens=8"]
    done = subprocess.run(
        [sys.executable, "-m", "rlkit", "train", f"examples/agents/{example}.yaml", *small],
        env={**os.environ, "RLKIT_RUNS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (run,) = (path for path in tmp_path.iterdir() if (path / "run.json").exists())
    (report,) = asyncio.run(audit(run)).values()
    assert report.mismatch is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("previous", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*ReadOnly:UserWarning")
def test_an_agent_of_openai_speaks_responses(previous: bool, stream: bool) -> None:
    pytest.importorskip("agents.run")
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

    def multiply(a: int, b: int) -> int:
        """Multiply two whole numbers."""
        return a * b

    async def solve(client: Any, *, a: int, b: int) -> float:
        set_tracing_disabled(disabled=True)
        model = OpenAIResponsesModel(model="policy", openai_client=client)
        agent = Agent(name="a", instructions="Use the tool.", model=model, tools=[function_tool(multiply)])
        question = f"What is {a} times {b}?"
        if stream:
            result = Runner.run_streamed(agent, question, auto_previous_response_id=previous)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, question, auto_previous_response_id=previous)
        return float(str(a * b) in str(result.final_output))

    policy = make_policy()
    assert asyncio.run(rlkit.CallableEnv(partial(solve, a=12, b=34)).rollout(policy)) == 1.0
    check_record(policy)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*ReadOnly:UserWarning")
def test_an_agent_of_pydantic_ai_calls_tools() -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def multiply(a: int, b: int) -> int:
        """Multiply two whole numbers."""
        return a * b

    async def solve(client: Any, *, a: int, b: int) -> float:
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        agent = Agent(model, system_prompt="Use the tool.", tools=[multiply])
        result = await agent.run(f"What is {a} times {b}?")
        return float(str(a * b) in str(result.output))

    policy = make_policy()
    assert asyncio.run(rlkit.CallableEnv(partial(solve, a=12, b=34)).rollout(policy)) == 1.0
    check_record(policy)
