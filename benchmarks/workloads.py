"""The workloads on which schedules are compared, the same for rlkit and its peer.

A rollout is a dialogue over plain tokens. The task and the sampled tokens determine its prompts, its number of turns
and the time of its tools. A sample depends on its prompt and on the number of earlier samples of that prompt. The
members of a group are therefore the same rollouts, in whatever order they are played.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

import rlkit
from rlkit.testing.world import Latency, digest
from rlkit.types import Tokens

type Ids = Sequence[int] | Tokens
"""Tokens as a list or an array."""

PROMPT_TOKENS = 100
OBSERVATION_TOKENS = 50
MAX_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload of a training run.

    Args:
        groups: groups per step.
        group_size: rollouts per group.
        latency: latency of the service.
        turns: minimum and maximum number of turns of a rollout.
        tool_s: mean of the log-normal time of a tool after each turn; 0 for no tool.
        constant: share of tasks with equal rewards.
        steps: steps of the run.
    """

    groups: int
    group_size: int
    latency: Latency
    turns: tuple[int, int] = (1, 1)
    tool_s: float = 0.0
    constant: float = 0.0
    steps: int = 20

    @property
    def single(self) -> bool:
        """True if every rollout has one turn."""
        return self.turns == (1, 1)


_SERVICE = Latency(
    first_s=0.3, token_s=0.02, sigma=0.8, gradient_s=5, trained_tokens_per_s=20_000, step_s=2, save_s=5, load_s=5
)
_MATH = Workload(groups=16, group_size=16, latency=replace(_SERVICE, mean_tokens=790))
_SMALL = Workload(groups=8, group_size=8, latency=replace(_SERVICE, mean_tokens=280, sigma=0.55), steps=12)

WORKLOADS: Mapping[str, Workload] = {
    "math": _MATH,
    "stragglers": replace(_MATH, latency=replace(_MATH.latency, slow_share=0.005, slow_factor=10)),
    "agent": Workload(8, 8, replace(_SERVICE, mean_tokens=256), turns=(4, 12), tool_s=5.0),
    "small": _SMALL,
    "clock": replace(_SMALL, latency=replace(_SMALL.latency, gradient_s=2, clock_s=10)),
    "clock 5": replace(_SMALL, latency=replace(_SMALL.latency, clock_s=10)),
    "constant": replace(_SMALL, constant=0.4),
}


@dataclass(slots=True)
class Played:
    """Numbers of started and of concurrent rollouts."""

    rollouts: int = 0
    live: int = 0
    most_live: int = 0
    by_task: Counter[int] = field(default_factory=Counter[int])

    def begin(self, task: int) -> None:
        """Count the start of a rollout."""
        self.rollouts += 1
        self.by_task[task] += 1
        self.live += 1
        self.most_live = max(self.most_live, self.live)

    def end(self) -> None:
        """Count the end of a rollout."""
        self.live -= 1


def question(task: int) -> str:
    """Return the question of a task: 100 bytes, each a token."""
    return f"task {task:06d} ".ljust(PROMPT_TOKENS, ".")


def observation(turn: int) -> list[int]:
    """Return the output of a tool."""
    return list(f"turn {turn:03d} ".ljust(OBSERVATION_TOKENS, ".").encode())


def turns(workload: Workload, first: Ids) -> int:
    """Return the number of turns of a rollout with the given first reply."""
    min_turns, max_turns = workload.turns
    return min_turns + digest("turns", _key(first)) % (max_turns - min_turns + 1)


async def use_tool(workload: Workload, reply: Ids) -> None:
    """Wait for the duration of the tool."""
    if workload.tool_s:
        sigma = 0.5
        seed = digest("tool", _key(reply))
        seconds = np.random.default_rng(seed).lognormal(np.log(workload.tool_s) - sigma**2 / 2, sigma)
        await asyncio.sleep(float(seconds))


def reward(workload: Workload, task: int, reply: Ids) -> float:
    """Return a pseudo-random reward, or 1 for a task with equal rewards."""
    if digest("constant", task) / 2**64 < workload.constant:
        return 1.0
    return digest("reward", task, _key(reply)) / 2**64


def _key(tokens: Ids) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


class OneTurn(rlkit.SingleTurnEnv):
    """A task of one turn, for rlkit."""

    def __init__(self, workload: Workload, number: int, played: Played) -> None:
        self.workload, self.number, self.played = workload, number, played
        self.task_id = f"task-{number}"

    async def rollout(self, policy: rlkit.Policy) -> rlkit.Outcome | float:
        self.played.begin(self.number)
        try:
            return await super().rollout(policy)
        finally:
            self.played.end()

    def prompt(self) -> str:
        return question(self.number)

    def grade(self, reply: rlkit.Reply) -> float:
        return reward(self.workload, self.number, reply.turn.completion)


class Agent(rlkit.Env):
    """A task of several turns with a tool, for rlkit."""

    def __init__(self, workload: Workload, number: int, played: Played) -> None:
        self.workload, self.number, self.played = workload, number, played
        self.task_id = f"task-{number}"

    async def rollout(self, policy: rlkit.Policy) -> float:
        self.played.begin(self.number)
        try:
            return await self._play(policy)
        finally:
            self.played.end()

    async def _play(self, policy: rlkit.Policy) -> float:
        tokens = np.frombuffer(question(self.number).encode(), np.uint8).astype(np.int32)
        turn, last = 1, 1
        while True:
            reply = (await policy.sample(tokens)).turn.completion
            if turn == 1:
                last = turns(self.workload, reply)
            await use_tool(self.workload, reply)
            if turn == last:
                return reward(self.workload, self.number, reply)
            tokens = np.concatenate([tokens, reply, np.asarray(observation(turn), np.int32)])
            turn += 1


class InOrder(rlkit.TaskSource):
    """A source of tasks 0, 1, 2, … for rlkit."""

    def __init__(self, workload: Workload, played: Played) -> None:
        self._workload, self._played, self._draw_count = workload, played, 0

    def next(self) -> rlkit.Env:
        self._draw_count += 1
        return (OneTurn if self._workload.single else Agent)(self._workload, self._draw_count - 1, self._played)

    def observe(self, group: rlkit.Group) -> None:
        pass

    def state_dict(self) -> Mapping[str, rlkit.Json]:
        return {"drawn": self._draw_count}

    def load_state_dict(self, state: Mapping[str, rlkit.Json]) -> None:
        self._draw_count = int(str(state["drawn"]))
