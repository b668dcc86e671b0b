"""What a command needs so that a job which is started again goes on where it was stopped.

Invariant: only words are added, and only to `rlkit train`; every other command is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePosixPath


def restartable(command: Sequence[str], *, name: str) -> list[str]:
    """The command, with `--resume` and a name for its run where it is `rlkit train` and has none.

    Args:
        command: its words.
        name: for a run that has none. It must be the same each time, and no other job's.
    """
    words = list(command)
    if not trains(words) or "--dry-run" in words:
        return words
    if not any(word == "--name" or word.startswith(("--name=", "name=")) for word in words):
        words += ["--name", name]
    if "--resume" not in words:
        words.append("--resume")
    return words


def trains(command: Sequence[str]) -> bool:
    """Whether a command is `rlkit train`, also behind `uv run` or `python -m`."""
    return any(word == "train" and PurePosixPath(before).name == "rlkit" for before, word in pairwise(command))
