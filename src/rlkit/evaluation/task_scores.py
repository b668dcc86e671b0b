"""What an evaluation says of single tasks, and of how episodes ended.

Invariant: everything is counted from the episodes alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlkit.metrics.metrics import SOLVED
from rlkit.types import Episode, Group, Json

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class TaskScore:
    """A task that was evaluated.

    Args:
        env: name of the environment.
        task: id of the task.
        attempts: number of episodes, failed ones included.
        solved: number of episodes with a reward of at least 1.
        reward: mean reward of the episodes that did not fail; None without one.
        endings: number of episodes by their ending.
    """

    env: str
    task: str
    attempts: int
    solved: int
    reward: float | None
    endings: Mapping[str, int]

    def to_json(self) -> dict[str, Json]:
        """Return the score as JSON."""
        counts: dict[str, Json] = {"attempts": self.attempts, "solved": self.solved, "reward": self.reward}
        return {"env": self.env, "task": self.task, **counts, "ended": dict(self.endings)}


def score_tasks(groups: Sequence[Group]) -> list[TaskScore]:
    """Return the score of each task, in the order of the evaluation."""
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
                endings=dict(Counter(map(describe_ending, group.episodes))),
            )
        )
    return scores


def count_endings(scores: Sequence[TaskScore]) -> dict[str, int]:
    """Return the number of episodes by their ending, the most frequent first."""
    total = Counter[str]()
    for score in scores:
        total.update(score.endings)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def describe_ending(episode: Episode) -> str:
    """Return how an episode ended, in a word.

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
