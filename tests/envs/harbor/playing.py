"""Real trials with the agent, and what a script says in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .conftest import write_task

SOLVED = "the file must say done"
TASK = """FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04
WORKDIR /app
"""
TEST = '#!/bin/bash\nif [ "$(cat /app/out)" = done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'
DO = "echo done > /app/out\n"


def write_simple(folder: Path, *, settings: str = "") -> Path:
    """A task that is solved when `/app/out` says done."""
    return write_task(folder, settings=settings, dockerfile=TASK, test=TEST)


def said(*keystrokes: str, complete: bool = False, analysis: str = "a", duration: float = 0.05) -> str:
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


DONE = [said(complete=True), said(complete=True)]


async def play(task: Path, policy: object, *, timeout_s: float | None = None, **options: object):
    """Play a trial; its result and how the agent ended."""
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.trial import Trial

    from rlkit.envs.harbor.agent import ended, lent

    with lent(policy) as key:
        config = TrialConfig(
            task=TaskConfig(path=task),
            trials_dir=task.parent / "trials",
            agent=AgentConfig(
                import_path="rlkit.envs.harbor.agent:RLTerminus2",
                kwargs={"policy": key, **options},
                override_timeout_sec=timeout_s,
            ),
            environment=EnvironmentConfig(import_path="rlkit.envs.harbor.sandbox:LocalSandbox"),
        )
        result = await (await Trial.create(config)).run()
        return result, ended(key)


def reward(result: object) -> float | None:
    return None if result.verifier_result is None else result.verifier_result.rewards["reward"]


def whole(turns: Sequence[object], index: int) -> list[int]:
    """All tokens of a turn, prompt and completion, rebuilt from the record."""
    turn = turns[index]
    before = [] if turn.parent is None else whole(turns, turn.parent)
    return [*before, *turn.prompt.tokens.tolist(), *turn.completion.tolist()]
