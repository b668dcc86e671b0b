"""Agent of a trial, with the policy of a rollout as its model.

Invariant: the policy is within reach of the agent only while its context manager is open.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlkit.envs.harbor.agents.agent_end import AgentEnd
from rlkit.envs.harbor.agents.policy_registry import get_agent_end, register_policy
from rlkit.policy import Policy
from rlkit.types import Json

if TYPE_CHECKING:
    from harbor.trial.trial import Trial


@dataclass(frozen=True)
class AgentAccess:
    """An agent that can play a trial.

    Args:
        fields: fields of Harbor's `AgentConfig`.
        get_end: returns the end of the agent's work so far.
        prepare: called with the trial before it runs.
    """

    fields: Mapping[str, Json]
    get_end: Callable[[], AgentEnd]
    prepare: Callable[[Trial], None] = lambda trial: None


@asynccontextmanager
async def open_own_agent(
    import_path: str, policy: Policy, options: Callable[[str], Mapping[str, Json]]
) -> AsyncGenerator[AgentAccess]:
    """Let an agent of rlkit use a policy until the end of the block; `options` takes the key of the policy."""
    with register_policy(policy) as key:
        yield AgentAccess({"import_path": import_path, "kwargs": {**options(key)}}, lambda: get_agent_end(key))
