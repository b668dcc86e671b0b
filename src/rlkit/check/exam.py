"""What the checks share: the tasks under check, and how a check says what it found.

Invariant: a check plays at least one case, and stops for time only between cases, so that a slow environment is checked
less and never for long.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rlkit.check.play import Play, Player
from rlkit.check.replies import MADE_UP_CALL, PLAIN, THOUGHTFUL, calls_of
from rlkit.check.report import Finding
from rlkit.check.structure import Snapshot
from rlkit.env import Env

BUDGET_S = 2.0
"""How long one check goes on playing further cases."""

CLOSELY = 2
"""How many tasks are played for what all tasks of an environment do alike."""

FULL = 1.0
"""The full reward of an environment that names no `max_reward`."""


@dataclass(slots=True)
class Problems:
    """What one check found wrong."""

    check: str
    fix: str
    lines: list[str] = field(default_factory=list[str])

    def finding(self, passed: str) -> Finding:
        """Failed with the first two problems, or passed."""
        if not self.lines:
            return Finding(self.check, "passed", passed)
        more = f" (and {len(self.lines) - 2} more)" if len(self.lines) > 2 else ""
        return Finding(self.check, "failed", "; ".join(self.lines[:2]) + more, self.fix)

    def skipped(self, why: str) -> Finding:
        """The check does not apply."""
        return Finding(self.check, "skipped", why)


@dataclass(slots=True)
class Exam:
    """The tasks under check and what is known of them.

    Args:
        before: each task as it was.
        first: each task's first play.
        golden: the best reward that a gold answer had.
        long: task and reply of rollouts that asked for more than one completion.
    """

    envs: Sequence[Env]
    player: Player
    seed: int
    before: Sequence[Snapshot]
    first: list[Play] = field(default_factory=list[Play])
    golden: float = FULL
    long: list[tuple[Env, str]] = field(default_factory=list[tuple[Env, str]])

    @property
    def replies(self) -> list[str]:
        """Replies that lead through an environment's branches: plain, empty, thoughtful, and calls of its tools."""
        tools = {tool["name"]: tool for play in self.first for tool in play.tools}
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


def full_reward(env: Env) -> float:
    """What the right answer earns."""
    return float(getattr(env, "max_reward", FULL))
