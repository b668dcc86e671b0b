"""Measure the cost of the OpenReward adapter per tool call, compared with the SDK alone.

    python benchmarks/openreward_sessions.py

A script gives the replies, so there is no model. The server is a separate process and does not count. Both sides open
the same sessions and make the same calls, concurrently on one event loop. The result is the processor time of this
process.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median

from rlkit.envs.openreward import openreward
from rlkit.envs.openreward.connection.clients import environment
from rlkit.envs.openreward.task import OpenRewardTask
from rlkit.testing import ScriptedPolicy
from rlkit.types import Message, Tool

SERVER = "python examples/openreward_env/server.py lookup --port {port}"
SEARCH = {"item": "egg"}
SUBMIT = {"answer": 0}


def reply(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


async def adapter(tasks: Sequence[OpenRewardTask], sessions: int, calls: int) -> None:
    script = [*[reply("search", '{"item": "egg"}')] * (calls - 1), reply("submit", '{"answer": 0}')]
    outcomes = await asyncio.gather(*(tasks[n].rollout(ScriptedPolicy(script)) for n in range(sessions)))
    assert all(outcome.metrics["tool_calls"] == calls for outcome in outcomes)


async def policy_alone(tasks: Sequence[OpenRewardTask], sessions: int, calls: int) -> None:
    """Hold the adapter's conversations without a server: render, record and parse."""
    tools: list[Tool] = [
        {"name": "search", "description": "", "parameters": {}},
        {"name": "submit", "description": "", "parameters": {}},
    ]

    async def converse() -> None:
        policy = ScriptedPolicy([reply("search", '{"item": "egg"}')] * calls)
        question = "What do 2 × egg and 3 × hat cost? Search, calculate and submit."
        messages: list[Message] = [{"role": "user", "content": question}]
        for _ in range(calls):
            answer = await policy.chat(messages, tools=tools)
            messages += [answer.message, {"role": "tool", "content": "One egg costs 2 coins."}]

    await asyncio.gather(*(converse() for _ in range(sessions)))


async def raw(tasks: Sequence[OpenRewardTask], sessions: int, calls: int) -> None:
    env = await environment(tasks[0].settings.access)

    async def play(index: int) -> None:
        async with env.session(split="train", index=index) as session:
            await session.get_prompt()
            await session.list_tools()
            for _ in range(calls - 1):
                await session.call_tool("search", SEARCH)
            await session.call_tool("submit", SUBMIT)

    await asyncio.gather(*(play(index) for index in range(sessions)))


type Side = Callable[[Sequence[OpenRewardTask], int, int], Awaitable[None]]


def measured(side: Side, tasks: Sequence[OpenRewardTask], sessions: int, calls: int) -> tuple[float, float]:
    """Return processor and wall time per call in milliseconds."""

    async def main() -> tuple[float, float]:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        await side(tasks, sessions, calls)
        return time.process_time() - cpu_s, time.perf_counter() - wall_s

    cpu_s, wall_s = asyncio.run(main())
    return cpu_s / (sessions * calls) * 1e3, wall_s / (sessions * calls) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--calls", type=int, default=8, help="tool calls per session")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    tasks = openreward(server=SERVER, max_turns=arguments.calls, max_sessions=arguments.sessions)
    sides: dict[str, Side] = {"the SDK alone": raw, "the adapter": adapter, "its conversations alone": policy_alone}
    times_by_side: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(arguments.repeats + 1):  # the first round warms up
        for name, side in sides.items():
            times_by_side[name].append(measured(side, tasks, arguments.sessions, arguments.calls))
    print(f"{arguments.sessions} concurrent sessions with {arguments.calls} calls each; milliseconds per call:")
    for name, times in times_by_side.items():
        cpu, wall = (median(run_times[side] for run_times in times[1:]) for side in (0, 1))
        print(f"  {name:24} {cpu:6.2f} processor  {wall:6.2f} wall")
    cpu = {name: median(run_times[0] for run_times in times[1:]) for name, times in times_by_side.items()}
    print(f"  the adapter adds {cpu['the adapter'] - cpu['the SDK alone']:.2f} ms of processor time per call")


if __name__ == "__main__":
    main()
