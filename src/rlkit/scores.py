"""What an evaluation says of single tasks, and of how episodes ended.

Invariant: everything is counted from the episodes alone.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlkit.metrics import SOLVED
from rlkit.types import Episode, Group

_Z = 1.959963984540054
"""Of the normal distribution, for an interval of 95 %."""

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class TaskScore:
    """A task that was evaluated.

    Args:
        env: name of the environment.
        task: the task's id.
        attempts: episodes, those that failed included.
        solved: episodes with a reward of at least 1.
        reward: the mean over the episodes that did not fail; None without one.
        ended: how many episodes ended how.
    """

    env: str
    task: str
    attempts: int
    solved: int
    reward: float | None
    ended: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PassRate:
    """The share of attempts that solve a task, in the mean over tasks, with an interval of 95 %.

    Args:
        value: the mean over tasks of each one's solved share of the attempts that did not fail.
        low: lower end of the interval.
        high: upper end.
        tasks: with such an attempt.
    """

    value: float
    low: float
    high: float
    tasks: int


def task_scores(groups: Sequence[Group]) -> list[TaskScore]:
    """One for each task, in the order of the evaluation."""
    scores = list[TaskScore]()
    for group in groups:
        rewards = group.rewards[group.valid]
        scores.append(
            TaskScore(
                env=group.env,
                task=group.task,
                attempts=len(group.episodes),
                solved=int((rewards >= SOLVED).sum()),
                reward=float(rewards.mean()) if len(rewards) else None,
                ended=dict(Counter(map(ending, group.episodes))),
            )
        )
    return scores


def endings(scores: Sequence[TaskScore]) -> dict[str, int]:
    """How many episodes ended how, the most frequent first."""
    total = Counter[str]()
    for score in scores:
        total.update(score.ended)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def ending(episode: Episode) -> str:
    """How an episode ended, in a word.

    `solved` where its reward is full; else what its environment says in `info["ended"]`, such as a cause, or its
    status. Of one that failed, `failed: ` and the word before the first colon of its error.
    """
    if episode.reward is None:
        found = _NAME.match(episode.error or "")
        return f"failed: {found[0]}" if found and (episode.error or "")[found.end() :].startswith(":") else "failed"
    if episode.reward >= SOLVED:
        return "solved"
    said = episode.info.get("ended")
    return said if isinstance(said, str) and said else episode.status


def pass_rate(scores: Sequence[TaskScore]) -> PassRate | None:
    """pass@1; None where every attempt failed.

    The interval is Wilson's (1927), of as many tries as would give the same standard error if they were independent:
    attempts at one task are not, tasks are. With a standard error of 0, which says little, they are the tasks.
    """
    shares = [score.solved / valid for score in scores if (valid := _valid(score))]
    count = len(shares)
    if not count:
        return None
    mean = sum(shares) / count
    error = math.sqrt(sum((share - mean) ** 2 for share in shares) / (count * max(count - 1, 1)))
    tries = mean * (1 - mean) / error**2 if error > 0 else float(count)
    low, high = _wilson(mean, tries)
    return PassRate(mean, low, high, count)


def _valid(score: TaskScore) -> int:
    return score.attempts - sum(number for name, number in score.ended.items() if name.startswith("failed"))


def _wilson(share: float, tries: float) -> tuple[float, float]:
    spread = _Z**2 / tries
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / tries + spread / (4 * tries)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
