"""How the tasks of an environment are played: everything but the tasks themselves.

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
    """How an environment is played.

    Args:
        access: where it is.
        secrets: that it is given.
        reward: what an episode is worth.
        time: limits of requests.
        max_turns: replies of the model in one episode.
        max_tokens: of an episode, what the environment said included; None for the model's context.
        on_message: what becomes of a reply without a call, where the environment takes no answers: the end of the
            episode, or a word that a tool is to be called.
        system_prompt: said before everything else.
        toolset: tools of OpenReward's that are bound to the sessions.
        group_score: what becomes of the reward of how an episode compares with the others of its group, where the
            environment gives one: it is added to that of its calls, stands in its place, or is not asked for.
        max_sessions: at once.
        openings: sessions that are tried for one rollout before the model has said anything.
    """

    access: Access
    secrets: Secrets = field(default_factory=Secrets)
    reward: RewardRule = field(default_factory=RewardRule)
    time: TimeLimits = field(default_factory=TimeLimits)
    max_turns: int = 16
    max_tokens: int | None = None
    on_message: OnMessage = "end"
    system_prompt: str | None = None
    toolset: str | None = None
    group_score: GroupScore = "add"
    max_sessions: int = 256
    openings: int = 5
