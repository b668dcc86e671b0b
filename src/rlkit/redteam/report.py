"""Reports of the red team: what each cheat earned, beside an honest empty attempt.

Invariant: a cheat that failed, or that could not be tried, earned nothing, and the report says which of them it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rlkit.types import Json

type Result = Literal["earned", "nothing", "failed", "not tried"]
"""`earned`: more than an honest empty attempt. `nothing`: no more than that. `failed`: the episode had no reward. `not
tried`: the cheat needs what the environment does not have."""

SHOWN_TASKS = 3
"""A summary names so many tasks for each result."""

EPSILON = 1e-9
"""Rewards that differ by less are equal."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One cheat on one task.

    Args:
        reward: what it earned; None where the episode had none.
        detail: why it has none, or why the cheat was not tried.
    """

    cheat: str
    does: str
    task_id: str
    result: Result
    reward: float | None
    honest: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RedTeamReport:
    """All attempts on one environment.

    Args:
        attempts: cheats in the order of the red team's list, each with its tasks.
        untried: tasks on which nothing could be tried, with the reason.
    """

    attempts: Sequence[Attempt]
    untried: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """True if the honest attempt could be played everywhere and no cheat earned more than it."""
        return not self.untried and not self.earned

    @property
    def earned(self) -> Sequence[Attempt]:
        """The attempts that earned more than an honest empty one."""
        return [attempt for attempt in self.attempts if attempt.result == "earned"]

    def __str__(self) -> str:
        rows = summarise(self)
        width = max((len(row.cheat) for row in rows), default=5)
        lines = [f"{'cheat':{width}}  {'result':9}  reward  honest  detail"]
        for row in rows:
            reward = "-" if row.reward is None else f"{row.reward:g}"
            line = f"{row.cheat:{width}}  {row.result:9}  {reward:>6}  {row.honest:>6g}  {row.detail}"
            lines.append(line.rstrip())
        lines += [f"not attacked: {name}: {reason}" for name, reason in self.untried.items()]
        results = [row.result for row in rows]
        lines.append(
            f"{len(rows)} cheats: {results.count('earned')} earned more than an honest empty attempt, "
            f"{results.count('failed')} got no reward because the episode failed, "
            f"{results.count('not tried')} could not be tried"
        )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Json]:
        """Return the report as JSON: a summary of each cheat, and all attempts."""
        return {
            "ok": self.ok,
            "cheats": [{**asdict(row), "result": row.result} for row in summarise(self)],
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "not_attacked": dict(self.untried),
        }


def attempt_result(reward: float | None, honest: float) -> Result:
    """The result of a cheat that was tried."""
    if reward is None:
        return "failed"
    return "earned" if reward > honest + EPSILON else "nothing"


@dataclass(frozen=True, slots=True)
class CheatSummary:
    """One cheat over all tasks.

    Args:
        reward: the highest that it earned.
        detail: the tasks on which it earned, failed or was not tried, with the first reason.
    """

    cheat: str
    does: str
    counts: Mapping[Result, int]
    reward: float | None
    honest: float
    detail: str

    @property
    def result(self) -> Result:
        """The gravest of its results."""
        order: Sequence[Result] = ("earned", "nothing", "failed", "not tried")
        return next(result for result in order if self.counts.get(result))


def summarise(report: RedTeamReport) -> Sequence[CheatSummary]:
    """One summary a cheat, in the order of the attempts."""
    by_cheat: dict[str, list[Attempt]] = {}
    for attempt in report.attempts:
        by_cheat.setdefault(attempt.cheat, []).append(attempt)
    return [_summary(attempts) for attempts in by_cheat.values()]


def _summary(attempts: Sequence[Attempt]) -> CheatSummary:
    counts = dict(Counter[Result](attempt.result for attempt in attempts))
    best = max(attempts, key=lambda attempt: (attempt.result == "earned", attempt.reward or 0.0))
    details = list[str]()
    for result in ("earned", "failed", "not tried"):
        of_result = [attempt for attempt in attempts if attempt.result == result]
        if of_result:
            tasks = ", ".join(attempt.task_id for attempt in of_result[:SHOWN_TASKS])
            more = f" and {len(of_result) - SHOWN_TASKS} more" if len(of_result) > SHOWN_TASKS else ""
            reason = f": {of_result[0].detail}" if of_result[0].detail else ""
            details.append(f"{result} on {tasks}{more}{reason}")
    return CheatSummary(best.cheat, best.does, counts, best.reward, best.honest, "; ".join(details))
