"""A word about the first rollout of an environment that fails, when it fails.

Invariant: each environment is spoken of once.
"""

from __future__ import annotations

from collections.abc import Callable

from rlkit.env import Task
from rlkit.types import Episode

_ERROR_CHARS = 500


class FailureNotes:
    """Notes the first failed episode of each environment.

    Args:
        note: given the message.
        redacted: takes the secrets out of an error.
        where: stands before the name of an environment, as "the evaluation of ".
    """

    def __init__(self, note: Callable[[str], None], *, redacted: Callable[[str], str], where: str = "") -> None:
        self._note = note
        self._redacted = redacted
        self._where = where
        self._noted = set[str]()

    def add(self, task: Task, episode: Episode) -> None:
        """Look at an episode that ended."""
        if episode.status != "failed" or task.name in self._noted:
            return
        self._noted.add(task.name)
        error = " ".join(self._redacted(episode.error or "it did not say why").split())
        cut = error if len(error) <= _ERROR_CHARS else f"{error[:_ERROR_CHARS]} …"
        self._note(f"the first failed rollout of {self._where}{task.name}, task {task.id}: {cut}")
