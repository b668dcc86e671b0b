"""The tasks under check, and what the checks know of them.

Invariant: a check plays at least one case, and stops for time only between cases, so that a slow environment is checked
less and never for long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from rlkit.check.player import Player, WatchedRollout, name_of
from rlkit.check.replies import MADE_UP_CALL, PLAIN, THOUGHTFUL, calls_of
from rlkit.check.snapshots import Snapshot, snapshot
from rlkit.env import Env, TaskSource
from rlkit.errors import UsageError
from rlkit.types import Json

BUDGET_S = 2.0
"""How long one check goes on playing further cases."""

CLOSELY = 2
"""How many tasks are played for what all tasks of an environment do alike."""

FULL = 1.0
"""The full reward of an environment that names no `max_reward`."""


@dataclass(slots=True)
class CheckContext:
    """The tasks under check and what is known of them.

    Args:
        source: gave the tasks, if they were not given themselves.
        state: of the source, before it gave them.
        snapshots: each task as it was.
        first_plays: one of each task.
        gold_reward: the best that a gold answer had.
        long_cases: task and reply of rollouts that asked for more than one completion.
        problems: what the check that is under way found wrong, one line each.
    """

    envs: Sequence[Env]
    player: Player
    seed: int
    source: TaskSource | None
    state: Mapping[str, Json]
    snapshots: Sequence[Snapshot]
    first_plays: list[WatchedRollout] = field(default_factory=list[WatchedRollout])
    gold_reward: float = FULL
    long_cases: list[tuple[Env, str]] = field(default_factory=list[tuple[Env, str]])
    problems: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, source: TaskSource | Sequence[Env], player: Player, *, tasks: int, seed: int) -> Self:
        """Draw the tasks.

        Raises:
            UsageError: the source has none.
        """
        player.say("drawing tasks")
        restorable = None if isinstance(source, Sequence) else source
        state: Mapping[str, Json] = {} if restorable is None else restorable.state_dict()
        envs = draw_tasks(source, tasks=tasks, seed=seed)
        if not envs:
            raise UsageError("the source has no tasks to check")
        return cls(envs, player, seed, restorable, state, [snapshot(env) for env in envs])

    def add_problem(self, env: Env, text: str) -> None:
        """Note what is wrong with a task."""
        self.problems.append(f"{name_of(env)}: {text}")

    @property
    def replies(self) -> list[str]:
        """Replies that lead through an environment's branches: plain, empty, thoughtful, and calls of its tools."""
        tools = {tool["name"]: tool for play in self.first_plays for tool in play.tools}
        return [PLAIN, "", THOUGHTFUL, MADE_UP_CALL, *calls_of(list(tools.values()))[:6]]

    def cases(
        self, envs: Sequence[Env], replies: Iterable[str], *, budget_s: float = BUDGET_S
    ) -> Iterator[tuple[Env, str]]:
        """Each reply with each task, as far as the time goes."""
        started = time.monotonic()
        for number, (reply, env) in enumerate((reply, env) for reply in replies for env in envs):
            if number and time.monotonic() - started > budget_s:
                return
            yield env, reply


def draw_tasks(source: TaskSource | Sequence[Env], *, tasks: int, seed: int) -> Sequence[Env]:
    """Return up to so many tasks: of a sequence those that the seed chooses, of a source the next ones."""
    if isinstance(source, Sequence):
        chosen = random.Random(seed).sample(range(len(source)), min(tasks, len(source)))
        return [source[index] for index in sorted(chosen)]
    envs = list[Env]()
    while len(envs) < tasks and (env := source.next()) is not None:
        envs.append(env)
    return envs
