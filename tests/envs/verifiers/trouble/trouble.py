"""An environment in the format of verifiers, with the troubles that an environment can have."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Trouble", "TroubleEnv"]


NAMES = ("fine", "raises", "dies", "hangs", "looks", "is infinite", "scores slowly", "plays twice")


class TroubleEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class TroubleData(vf.TaskData):
    trouble: str


class TroubleTask(vf.Task[TroubleData, vf.State, vf.TaskConfig]):
    async def finalize(self, trace: vf.Trace) -> None:
        print("what an environment prints is not part of any protocol")
        match self.data.trouble:
            case "raises":
                raise ValueError("the task is broken")
            case "dies":
                os._exit(7)
            case "hangs":
                print("the task hangs", flush=True)
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    print("the task is cancelled", flush=True)
                    raise
            case "looks":
                secrets = sorted(name for name in os.environ if name.startswith("TROUBLE"))
                raise ValueError(f"it sees {secrets}")
            case _:
                pass

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @vf.reward
    async def words(self, trace: vf.Trace) -> float:
        if self.data.trouble == "is infinite":
            return float("inf")
        if self.data.trouble == "scores slowly":
            await asyncio.sleep(3600)
        return float(len(trace.last_reply.split()))


class Trouble(vf.Taskset[TroubleTask, vf.TasksetConfig]):
    def load(self) -> Iterator[TroubleTask]:
        for name in NAMES:
            timeout = vf.TaskTimeout(scoring=0.1 if name == "scores slowly" else None)
            data = TroubleData(id=name, prompt="Begin.", trouble=name, timeout=timeout)
            yield TroubleTask(data, self.config.task)


class TroubleEnv(vf.Env[TroubleEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        for _ in range(2 if task.data.trouble == "plays twice" else 1):
            async with agents.agent.interaction(task) as interaction:
                segment = await interaction.turn()
                while not segment.terminated and interaction.trace.num_turns < 3:
                    segment = await interaction.turn("Go on.")
