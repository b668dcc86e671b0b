"""Agents of frameworks at the endpoint of a rollout, unmodified: each calls a tool twice and answers, on the engine.

Frameworks that are not among the locked packages are laid over the environment, see `.ci/run`.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rlkit
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.tools.audit import audit
from tests.calling_model import check_training, teach_agent, write_call
from tests.test_examples import load

FACTORS = re.compile(r"What is (\d+) times (\d+)\?")


def call_the_tool_then_answer(prompt: str, *, seed: int, knows: bool = True) -> str:
    factors = FACTORS.search(prompt)
    assert factors, prompt
    a, b = int(factors[1]), int(factors[2])
    if str(a * b) not in prompt:
        return write_call("multiply", a=a, b=b)
    if str(2 * a * b) not in prompt:
        return write_call("multiply", a=a * b, b=2)
    return f"It is {a * b}." if knows else "I do not know."


def check_on_engine(env: rlkit.Env, folder: Path) -> None:
    """Check that a model of an agent is trained on the embedded engine on its calls and answers."""
    authors = [call_the_tool_then_answer, partial(call_the_tool_then_answer, knows=False)]
    rewards = list[object]()

    def play(policy: RecordingPolicy) -> None:
        rewards.append(asyncio.run(env.rollout(policy)))

    model = teach_agent(folder / "model", play, authors)
    assert rewards == [1.0, 0.0]
    check_training(model, env)


@pytest.fixture(autouse=True)
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("example", "package"),
    [
        ("openai_agents", "agents.run"),
        ("langgraph_agent", "langgraph"),
        ("litellm_agent", "mcp"),
    ],  # litellm needs mcp for tools
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*ReadOnly:UserWarning")
def test_an_agent_of_a_framework_is_trained_on_its_calls(example: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    make_tasks: Any = load(f"examples/agents/{example}.py:products")
    check_on_engine(make_tasks(count=1)[0], tmp_path)


@pytest.mark.parametrize(
    ("example", "package"),
    [("openai_agents", "agents.run"), ("langgraph_agent", "langgraph"), ("litellm_agent", "mcp")],
)
def test_an_example_of_an_agent_trains(example: str, package: str, byte_model_dir: Path, runs_dir: Path) -> None:
    pytest.importorskip(package)
    small = [f"model={byte_model_dir}", "steps=1", "batch.groups=2", "batch.group_size=2", "sampling.max_tokens=8"]
    done = subprocess.run(
        [sys.executable, "-m", "rlkit", "train", f"examples/agents/{example}.yaml", *small],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (run,) = (path for path in runs_dir.iterdir() if (path / "run.json").exists())
    (report,) = asyncio.run(audit(run)).values()
    assert report.mismatch is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("previous", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*ReadOnly:UserWarning")
def test_an_agent_of_openai_is_trained_by_responses(previous: bool, stream: bool, tmp_path: Path) -> None:
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

    check_on_engine(rlkit.CallableEnv(partial(solve, a=12, b=34)), tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*ReadOnly:UserWarning")
def test_an_agent_of_pydantic_ai_is_trained_on_its_calls(tmp_path: Path) -> None:
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

    check_on_engine(rlkit.CallableEnv(partial(solve, a=12, b=34)), tmp_path)
