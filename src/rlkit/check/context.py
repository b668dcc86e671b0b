"""Tasks under check, and the results that later checks use.

Invariant: a check plays at least one case. A slow environment gets fewer cases; time limits apply between cases.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from rlkit.check.player import Player, Script, get_task_name
from rlkit.check.replies import MADE_UP_CALL, PLAIN, THOUGHTFUL, write_tool_calls
from rlkit.check.snapshots import Snapshot, take_snapshot
from rlkit.env import Env, TaskSource
from rlkit.errors import UsageError
from rlkit.types import Json

BUDGET_S = 2.0
"""Seconds after which a check starts no further case."""

SAMPLE_TASKS = 2
"""Number of tasks to play for behaviour that all tasks of an environment share."""

DEFAULT_MAX_REWARD = 1.0
"""Full reward of an environment without `max_reward`."""


@dataclass(slots=True)
class CheckContext:
    """Tasks under check, with results that later checks use."""

    envs: Sequence[Env]
    player: Player
    seed: int
    source: TaskSource | None  # source of the tasks; None for a sequence
    state: Mapping[str, Json]  # state of the source before the draw
    snapshots: Sequence[Snapshot]  # state of each task before its first rollout
    gold_cases: Sequence[tuple[Env, Script]] = ()  # tasks with their gold answers, if all are valid
    gold_reward: float = DEFAULT_MAX_REWARD  # highest reward of a gold answer
    # Tasks and replies whose rollouts requested more than one completion.
    long_cases: list[tuple[Env, str]] = field(default_factory=list[tuple[Env, str]])
    problems: list[str] = field(default_factory=list[str])  # problems that the running check found, one line each

    @classmethod
    def draw(cls, source: TaskSource | Sequence[Env], player: Player, *, tasks: int, seed: int) -> Self:
        """Draw tasks for a check; UsageError if the source has no tasks."""
        player.announce("drawing tasks")
        restorable = None if isinstance(source, Sequence) else source
        state: Mapping[str, Json] = {} if restorable is None else restorable.state_dict()
        if not (envs := draw_tasks(source, tasks=tasks, seed=seed)):
            raise UsageError("the source has no tasks to check")
        return cls(envs, player, seed, restorable, state, [take_snapshot(env) for env in envs])

    def add_problem(self, env: Env, text: str) -> None:
        """Record a problem of a task once."""
        if (problem := f"{get_task_name(env)}: {text}") not in self.problems:
            self.problems.append(problem)

    @property
    def replies(self) -> list[str]:
        """Replies that exercise an environment: plain, empty, with thinking, and tool calls."""
        tools = {tool["name"]: tool for rollout in self.player.rollouts for tool in rollout.tools}
        return [PLAIN, "", THOUGHTFUL, MADE_UP_CALL, *write_tool_calls(list(tools.values()))[:6]]


def limit_time[T](cases: Iterable[T], *, budget_s: float = BUDGET_S) -> Iterator[T]:
    """Yield the first case, and more cases for at most `budget_s` seconds."""
    start_s = time.monotonic()
    for number, case in enumerate(cases):
        if number and time.monotonic() - start_s > budget_s:
            return
        yield case


def draw_tasks(source: TaskSource | Sequence[Env], *, tasks: int, seed: int) -> Sequence[Env]:
    """Return up to `tasks` tasks: a seeded choice from a sequence, or the next tasks of a source."""
    if isinstance(source, Sequence):
        indices = random.Random(seed).sample(range(len(source)), min(tasks, len(source)))
        return [source[index] for index in sorted(indices)]
    return [env for _ in range(tasks) if (env := source.next()) is not None]
