"""A small run with all that the pages show: turns, forks, calls, failures, limits, masks, an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import rlkit
from tests.simulation import Simulation

CALL: rlkit.ToolCall = {"id": "call_0", "name": "look", "arguments": {"at": "it"}}


class Mixed(rlkit.Env):
    """Fails, is cut off, is masked, forks or talks, by the number of its task and the letters of its reply."""

    def __init__(self, number: int) -> None:
        self.number, self.task_id = number, f"task-{number}"

    async def rollout(self, policy: rlkit.Policy) -> rlkit.Outcome:
        question: list[rlkit.Message] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": self.task_id},
        ]
        first = await policy.chat(question, max_tokens=12)
        if self.number % 5 == 3:
            raise ValueError(f"the grader of {self.task_id} died")
        answers: list[rlkit.Message] = [
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "a cat", "tool_call_id": "call_0"},
        ]
        for words in ("more", "again"):  # two branches from the first reply
            branch: Sequence[rlkit.Message] = [*question, first.message, {"role": "user", "content": words}]
            await policy.chat(branch, max_tokens=8)
        await policy.chat([*question, *answers], max_tokens=8, forced="Well, ")
        reward = float(len(set(first.text)) % 3)
        return rlkit.Outcome(
            reward,
            {"letters": float(len(first.text))},
            {"answer": first.text},
            truncated=self.number % 5 == 1,
            masked=self.number % 5 == 2,
        )


def record_run(directory: Path, *, steps: int = 3) -> Path:
    """Train on the simulated service, with an evaluation before and after."""
    settings: dict[str, object] = {
        "steps": steps,
        "batch": {"groups": 5, "group_size": 4},
        "rollouts": {"min_valid": 1},
    }
    tasks = [Mixed(number) for number in range(40)]
    Simulation(directory, settings=settings, tasks=tasks).train()
    return directory
