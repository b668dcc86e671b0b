"""Settings for playing the tasks of an environment.

Invariant: plain frozen data without a secret, so that a task can be pickled and played in another process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlkit.envs.openreward.connection.clients import Access
from rlkit.envs.openreward.connection.secrets import Secrets
from rlkit.envs.openreward.rewards import RewardRule
from rlkit.envs.openreward.session import TimeLimits

type OnMessage = Literal["end", "nudge"]
type GroupScore = Literal["add", "replace", "off"]


@dataclass(frozen=True)
class Settings:
    """Settings for playing an environment.

    The fields of the same name are arguments of `openreward`.
    """

    access: Access
    secrets: Secrets = field(default_factory=Secrets)
    reward: RewardRule = field(default_factory=RewardRule)
    time: TimeLimits = field(default_factory=TimeLimits)
    max_turns: int = 16
    # Limit of an episode, including the environment's messages; None for the model's context.
    max_tokens: int | None = None
    on_message: OnMessage = "end"
    system_prompt: str | None = None
    toolset: str | None = None
    group_score: GroupScore = "add"
    max_sessions: int = 256
    openings: int = 5  # maximum number of sessions opened for a rollout before the model's first reply
