"""Policies by key, for agents that Harbor creates from JSON only.

    with register_policy(policy) as key:
        path = "rlkit.envs.harbor.agents.agent:RLTerminus2"
        agent = AgentConfig(import_path=path, kwargs={"policy": key, "max_turns": 32})
        result = await (await Trial.create(TrialConfig(agent=agent, ...))).run()
        end = get_agent_end(key)

Invariant: Harbor only gets JSON, which it writes to disk. A policy is registered only inside its context manager.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlkit.envs.harbor.agents.agent_end import AgentEnd, Tally, sum_tallies
from rlkit.errors import UsageError
from rlkit.policy import Policy
from rlkit.types import Json

if TYPE_CHECKING:
    from harbor.trial.trial import Trial


@dataclass(frozen=True)
class AgentAccess:
    """An agent that can play a trial while it has a policy."""

    fields: Mapping[str, Json]  # fields of Harbor's `AgentConfig`
    get_end: Callable[[], AgentEnd]  # returns the end of the agent's work so far
    prepare: Callable[[Trial], None] = lambda trial: None  # called with the trial before it runs


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """Policy of an agent, and the tallies of the agent's runs: one per step of a task."""

    policy: Policy
    tallies: list[Tally] = field(default_factory=list[Tally])


_registrations: dict[str, Registration] = {}


@contextmanager
def register_policy(policy: Policy) -> Generator[str]:
    """Register a policy for agents of this process, and yield its key."""
    key = uuid.uuid4().hex
    _registrations[key] = Registration(policy)
    try:
        yield key
    finally:
        del _registrations[key]


@asynccontextmanager
async def open_own_agent(
    import_path: str, policy: Policy, options: Callable[[str], Mapping[str, Json]]
) -> AsyncGenerator[AgentAccess]:
    """Let an agent of rlkit use a policy until the end of the block; `options` takes the key of the policy."""
    with register_policy(policy) as key:
        yield AgentAccess({"import_path": import_path, "kwargs": {**options(key)}}, lambda: get_agent_end(key))


def get_agent_end(key: str) -> AgentEnd:
    """Return the end of the agent of a registered policy."""
    return sum_tallies(find_registration(key).tallies)


def find_registration(key: str) -> Registration:
    """Return the registration with a key; raise a UsageError if there is none."""
    if key not in _registrations:
        raise UsageError(
            f"agent option 'policy': no policy is registered as {key!r} in this process; see rlkit's register_policy"
        )
    return _registrations[key]
