"""Agents of Harbor whose model is a policy.

    trial = await Trial.create(TrialConfig(agent=AgentConfig(import_path=path, kwargs={"max_turns": 32}), ...))
    trial.agent.policy = policy
    result = await trial.run()
    end = trial.agent.end

Invariant: Harbor writes the settings of an agent to disk, and a policy is none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rlkit.envs.harbor.agents.agent_end import AgentEnd, Tally, sum_tallies
from rlkit.errors import UsageError
from rlkit.policy import Policy
from rlkit.types import Json

if TYPE_CHECKING:
    from harbor.trial.trial import Trial


class PolicyAgent:
    """An agent of a trial, whose policy is set before the trial runs."""

    @cached_property
    def policy(self) -> Policy:
        """The policy; UsageError if none is set."""
        raise UsageError("the agent has no policy: set `trial.agent.policy` before `trial.run()`")

    @cached_property
    def tallies(self) -> list[Tally]:
        """Ends of the agent's runs: one per step of a task."""
        return []

    @property
    def end(self) -> AgentEnd:
        """End of the agent's work so far."""
        return sum_tallies(self.tallies)


@dataclass(frozen=True)
class AgentAccess:
    """An agent that can play a trial while it has a policy."""

    fields: Mapping[str, Json]  # fields of Harbor's `AgentConfig`
    get_end: Callable[[], AgentEnd]  # returns the end of the agent's work so far
    prepare: Callable[[Trial], None]  # called with the trial before it runs


def give_policy(policy: Policy, *, import_path: str, options: Mapping[str, Json]) -> AgentAccess:
    """Return the access to an agent of rlkit, which gets the policy."""
    tallies = list[Tally]()

    def prepare(trial: Trial) -> None:
        assert isinstance(trial.agent, PolicyAgent)
        trial.agent.policy, trial.agent.tallies = policy, tallies

    return AgentAccess({"import_path": import_path, "kwargs": {**options}}, lambda: sum_tallies(tallies), prepare)
