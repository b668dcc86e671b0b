"""Report of the red team: the reward of each cheat, compared with an honest empty attempt.

Invariant: a cheat that failed or was not tried earned nothing; the report distinguishes the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from typing import Literal, get_args

from rlkit.types import Json

type Result = Literal["earned", "nothing", "failed", "not tried"]
"""Results, the most serious first. `earned`: the reward is higher than that of an honest empty attempt. `nothing`: it
is not. `failed`: the episode has no reward. `not tried`: the environment lacks a requirement of the cheat."""

SHOWN_TASKS = 3  # limit of tasks that a summary names for each result
EPSILON = 1e-9  # tolerance of equal rewards


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attempt of one cheat on one task."""

    cheat: str
    description: str
    task_id: str
    result: Result
    reward: float | None  # reward of the cheat; None if the episode has none
    honest_reward: float
    detail: str = ""  # reason why there is no reward, or no attempt


@dataclass(frozen=True, slots=True)
class RedTeamReport:
    """All attempts on one environment."""

    attempts: Sequence[Attempt]  # attempts, in the order of the red team's list of cheats
    skipped_tasks: Mapping[str, str]  # reasons by task, for tasks that were not attacked

    @property
    def ok(self) -> bool:
        """True if an honest attempt has a reward on every task and no cheat earned more."""
        return not self.skipped_tasks and not self.exploits

    @property
    def exploits(self) -> Sequence[Attempt]:
        """Attempts that earned more than an honest empty attempt."""
        return [attempt for attempt in self.attempts if attempt.result == "earned"]

    def summarise(self) -> Sequence[CheatSummary]:
        """Summarise each cheat, in the order of the attempts."""
        return [_summarise_cheat(list(attempts)) for _, attempts in groupby(self.attempts, attrgetter("cheat"))]

    def __str__(self) -> str:
        rows = self.summarise()
        width = max((len(row.cheat) for row in rows), default=5)
        lines = [f"{'cheat':{width}}  {'result':9}  reward  honest  detail"]
        for row in rows:
            reward = "-" if row.reward is None else f"{row.reward:g}"
            line = f"{row.cheat:{width}}  {row.result:9}  {reward:>6}  {row.honest_reward:>6g}  {row.detail}"
            lines.append(line.rstrip())
        lines += [f"not attacked: {name}: {reason}" for name, reason in self.skipped_tasks.items()]
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
            "cheats": [asdict(row) for row in self.summarise()],
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "skipped_tasks": dict(self.skipped_tasks),
        }


def classify_attempt(reward: float | None, honest: float) -> Result:
    """Return the result of an attempt with the given reward."""
    if reward is None:
        return "failed"
    return "earned" if reward > honest + EPSILON else "nothing"


@dataclass(frozen=True, slots=True)
class CheatSummary:
    """Summary of one cheat; `detail` names the tasks on which it earned, failed or was not tried, and a reason."""

    cheat: str
    description: str
    counts: Mapping[Result, int]
    reward: float | None
    honest_reward: float
    detail: str
    result: Result  # the most serious one


def _summarise_cheat(attempts: Sequence[Attempt]) -> CheatSummary:
    counts = dict(Counter[Result](attempt.result for attempt in attempts))
    best = max(attempts, key=lambda attempt: (attempt.result == "earned", attempt.reward or 0.0))
    details = list[str]()
    for result in ("earned", "failed", "not tried"):
        matches = [attempt for attempt in attempts if attempt.result == result]
        if matches:
            tasks = ", ".join(attempt.task_id for attempt in matches[:SHOWN_TASKS])
            more = f" and {len(matches) - SHOWN_TASKS} more" if len(matches) > SHOWN_TASKS else ""
            reason = f": {matches[0].detail}" if matches[0].detail else ""
            details.append(f"{result} on {tasks}{more}{reason}")
    result, detail = min(counts, key=get_args(Result.__value__).index), "; ".join(details)
    return CheatSummary(best.cheat, best.description, counts, best.reward, best.honest_reward, detail, result)
