"""Small builders of the core's data, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlkit.env import Task
from rlkit.tasks.sources import Mixture
from rlkit.types import Episode, Group, Message, Prompt, TokenPiece, Turn


def piece(token: int) -> TokenPiece:
    """The number of a token as its text."""
    return TokenPiece(f" {token}".encode(), False)


def turn(
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    forced: int = 0,
    parent: int | None = None,
    version: int = 0,
    messages: tuple[Message, ...] = (),
) -> Turn:
    """A turn whose log-probabilities are −0.1, −0.2, … for the sampled tokens."""
    count = len(completion)
    sampled = np.arange(count) >= forced
    logprobs = np.where(sampled, -(np.arange(count) + 1) / 10, 0).astype(np.float32)
    return Turn(
        prompt=Prompt(np.array(prompt, np.int32)),
        completion=np.array(completion, np.int32),
        logprobs=logprobs,
        sampled_mask=sampled,
        stop="stop",
        version=version,
        parent=parent,
        messages=messages,
    )


def episode(reward: float | None, *, member: int = 0, turns: Sequence[Turn] = ()) -> Episode:
    return Episode(
        member=member,
        attempt=0,
        turns=tuple(turns) or (turn([1, 2], [3, 4]),),
        status="failed" if reward is None else "completed",
        reward=reward,
        metrics={},
        info={},
        seconds=1.0,
        error="boom" if reward is None else None,
    )


def group(rewards: Sequence[float | None], *, env: str = "env", draw: int = 0) -> Group:
    return Group(env, "task", draw, tuple(episode(reward, member=i) for i, reward in enumerate(rewards)))


def draw(mixture: Mixture, count: int) -> list[Task]:
    """Draw up to `count` tasks."""
    return [task for _ in range(count) if (task := mixture.draw()) is not None]
