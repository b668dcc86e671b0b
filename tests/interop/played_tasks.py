"""Tasks that the programs play in the frameworks, and the replies of the model there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import rlkit
from rlkit.envs.arithmetic import arithmetic


class Broken(rlkit.Env):
    task_id = "broken"

    async def rollout(self, policy: rlkit.Policy) -> float:
        await policy.chat([{"role": "user", "content": "1 + 1 ="}])
        raise ValueError("the grader died")


class Slow(rlkit.Env):
    task_id = "slow"

    async def rollout(self, policy: rlkit.Policy) -> float:
        await policy.chat([{"role": "user", "content": "1 + 1 ="}])
        await asyncio.sleep(3600)
        return 1.0


class Rejected(rlkit.Env):
    task_id = "rejected"

    async def rollout(self, policy: rlkit.Policy) -> float:
        await policy.chat([{"role": "user", "content": "reject this"}])
        return 1.0


class Counting(rlkit.StepEnv[list[int]]):
    """A quarter of a point for each reply, without an end: the framework's own limit ends it."""

    task_id = "counting"

    def reset(self) -> tuple[list[int], Sequence[rlkit.Message]]:
        return [], [{"role": "user", "content": "0 + 0 ="}]

    async def step(self, state: list[int], reply: rlkit.Reply) -> rlkit.Step:
        state.append(1)
        question: rlkit.Message = {"role": "user", "content": f"{len(state)} + 0 ="}
        return rlkit.Step([question], reward=0.25, metrics={"replies": len(state)})


class Looking(rlkit.ToolEnv[None]):
    """A reply is right if it is what the tool returned."""

    task_id = "looking"

    def reset(self) -> tuple[None, Sequence[rlkit.Message]]:
        return None, [{"role": "user", "content": "look with the tool"}]

    def tools(self) -> Sequence[rlkit.Tool]:
        properties = {"at": {"type": "string", "description": "the place"}}
        schema = {"type": "object", "properties": properties, "required": ["at"]}
        return [{"name": "look", "description": "Look somewhere.", "parameters": schema}]

    async def call(self, state: None, call: rlkit.ToolCall) -> str:
        return f"a cat {call['arguments']['at']}"

    async def grade(self, state: None, reply: rlkit.Reply | None) -> float:
        return float(reply is not None and reply.text == "seen: a cat there")


def tasks() -> list[rlkit.Env]:
    return [Looking(), *arithmetic(count=4, seed=1), Broken(), Counting(), Slow()]


def answer(text: str) -> str:
    """The sum that a prompt asks for; one too large if its first number is odd."""
    left, right = text.splitlines()[-1].removesuffix(" =").split(" + ")
    return str(int(left) + int(right) + int(left) % 2)
