"""Scores of single tasks in an evaluation, and the endings of their episodes.

Invariant: all counts are computed from the episodes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlkit.metrics.metrics import SOLVED
from rlkit.types import Episode, Group

_ERROR_NAME = re.compile(r"([A-Za-z_]\w*):")


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Result of an evaluation for one task."""

    env: str
    task: str  # id of the task
    attempts: int  # number of episodes, failed ones included
    solved: int  # number of episodes with a reward of at least 1
    reward: float | None  # mean reward of the episodes that did not fail; None if all failed
    endings: Mapping[str, int]  # number of episodes by their ending


def score_tasks(groups: Sequence[Group]) -> list[TaskScore]:
    """Return the score of each task, in the order of the evaluation."""
    scores = list[TaskScore]()
    for group in groups:
        rewards, endings = group.rewards[group.valid_mask], Counter(map(describe_ending, group.episodes))
        solved, reward = int((rewards >= SOLVED).sum()), float(rewards.mean()) if len(rewards) else None
        scores.append(TaskScore(group.env, group.task, len(group.episodes), solved, reward, dict(endings)))
    return scores


def count_endings(scores: Sequence[TaskScore]) -> dict[str, int]:
    """Return the number of episodes by their ending, the most frequent first."""
    total = sum((Counter(score.endings) for score in scores), Counter[str]())
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def describe_ending(episode: Episode) -> str:
    """Return the ending of an episode as a word.

    It is `solved` if the reward is at least 1, else `info["ended"]` if the environment sets that, else the status. For
    a failed episode it is `failed: ` and the name of the error.
    """
    if episode.reward is None:
        error_name = _ERROR_NAME.match(episode.error or "")
        return f"failed: {error_name[1]}" if error_name else "failed"
    if episode.reward >= SOLVED:
        return "solved"
    cause = episode.info.get("ended")
    return cause if isinstance(cause, str) and cause else episode.status
