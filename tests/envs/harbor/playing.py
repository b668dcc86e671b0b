"""Real trials with the agent, and what a script says in them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlkit.errors import ServiceError
from rlkit.policy import Limits, Sampler
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.testing import ByteChat, ScriptedPolicy, ScriptedSampler
from rlkit.types import Completion, Message, Prompt, Reply, Sampling

from .conftest import AgentTime, write_task

TASK = """FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04
WORKDIR /app
"""
TEST = '#!/bin/bash\nif [ "$(cat /app/out)" = done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'
PATIENT_TEST = TEST.replace("if [", "for _ in $(seq 200); do [ -s /app/out ] && break; sleep 0.1; done\nif [")
"""The same, for an agent that ends right behind its command: its terminal may carry that out a moment later."""
DO = "echo done > /app/out\n"


def write_simple(folder: Path, *, settings: str = "") -> Path:
    """A task that is solved when `/app/out` says done."""
    return write_task(folder, settings=settings, dockerfile=TASK, test=TEST)


def make_reply(*keystrokes: str, complete: bool = False, analysis: str = "a", duration: float = 0.05) -> str:
    """A reply in Terminus2's JSON."""
    commands = [{"keystrokes": keys, "duration": duration} for keys in keystrokes]
    return json.dumps({"analysis": analysis, "plan": "p", "commands": commands, "task_complete": complete})


def said_xml(*keystrokes: str, complete: bool = False) -> str:
    """The same in XML."""
    commands = "".join(f'<keystrokes duration="0.05">{keys}</keystrokes>' for keys in keystrokes)
    return (
        f"<response><analysis>a</analysis><plan>p</plan><commands>{commands}</commands>"
        f"<task_complete>{str(complete).lower()}</task_complete></response>"
    )


DONE = [make_reply(complete=True), make_reply(complete=True)]


def working_in_turn(command: str) -> Callable[[str], str]:
    """A model that carries a command out in every other conversation about a task, and says that it is done.

    Args:
        command: with the newline that sends it.
    """
    requests, mark = Counter[str](), "I have looked at it."

    def reply(text: str) -> str:
        if mark in text:
            return make_reply(complete=True)
        task = text.partition("Current terminal state:")[0]  # the screen may or may not show a prompt by then
        requests[task] += 1
        return make_reply(command if requests[task] % 2 else "true\n", complete=True, analysis=mark)

    return reply


async def play(
    task: Path,
    policy: object,
    *,
    timeout_s: float | None = None,
    environment: str = "rlkit.envs.harbor.sandbox:LocalSandbox",
    **options: object,
):
    """Play a trial; its result and how the agent ended."""
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.trial import Trial

    config = TrialConfig(
        task=TaskConfig(path=task),
        trials_dir=task.parent / "trials",
        agent=AgentConfig(
            import_path="rlkit.envs.harbor.agents.terminus:PolicyTerminus2",
            kwargs=options,
            override_timeout_sec=timeout_s,
        ),
        environment=EnvironmentConfig(import_path=environment),
    )
    trial = await Trial.create(config)
    trial.agent.policy = policy
    return await trial.run(), trial.agent.end


def reward(result: object) -> float | None:
    return None if result.verifier_result is None else result.verifier_result.rewards["reward"]


def whole(turns: Sequence[object], index: int) -> list[int]:
    """All tokens of a turn, prompt and completion, rebuilt from the record."""
    turn = turns[index]
    before = [] if turn.parent is None else whole(turns, turn.parent)
    return [*before, *turn.prompt.tokens.tolist(), *turn.completion.tolist()]


class Late(ScriptedPolicy):
    """A policy with whose last reply the time of the agent is over."""

    def __init__(self, replies: Sequence[str], agent_time: AgentTime) -> None:
        super().__init__(replies)
        self._count, self._agent_time = len(replies), agent_time

    async def chat(self, messages: Sequence[Message], **options: Any) -> Reply:
        reply = await super().chat(messages, **options)
        if len(self.turns) == self._count:
            asyncio.get_running_loop().call_later(0.2, self._agent_time.end)
        return reply


class Faulty(ScriptedSampler):
    """A scripted sampler with trouble.

    Args:
        replies: in order.
        failing: calls, from 0, that the service fails.
        hanging: the call that never comes back.
        on_hang: called then.
    """

    def __init__(
        self,
        replies: Sequence[str],
        *,
        failing: range = range(0),
        hanging: int = -1,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        script = iter(replies)
        super().__init__(lambda prompt, *, seed: next(script), chat=ByteChat())
        self.calls = 0
        self._failing, self._hanging, self._on_hang = failing, hanging, on_hang

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        call, self.calls = self.calls, self.calls + 1
        if call in self._failing:
            raise ServiceError("sampling: the service answered 503")
        if call == self._hanging:
            self._on_hang()
            await asyncio.Event().wait()
        return await super().sample(prompt, sampling, seed=seed, num_samples=num_samples)


def recording(sampler: Sampler, *, max_tokens: int = 4000, limits: Limits = Limits()) -> RecordingPolicy:
    """The policy handle of a run over a sampler."""
    return RecordingPolicy(
        sampler=lambda: sampler,
        chat=ByteChat(),
        sampling=Sampling(max_tokens=max_tokens),
        seed=lambda turn: turn,
        limits=limits,
    )
