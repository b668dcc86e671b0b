"""Policies on loan to agents, which Harbor makes from JSON alone and which find their policy by a key.

    with lent(policy) as key:
        path = "rlkit.envs.harbor.agents.agent:RLTerminus2"
        agent = AgentConfig(import_path=path, kwargs={"policy": key, "max_turns": 32})
        result = await (await Trial.create(TrialConfig(agent=agent, ...))).run()
        end = ended(key)

Invariant: Harbor is given JSON only, which it writes to the disk. A policy is in the register only while it is lent.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlkit.envs.harbor.agents.ending import AgentEnd, Tally, summed
from rlkit.errors import UsageError
from rlkit.policy import Policy


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """A policy that an agent plays with, and the tallies of the agent's runs: one for each step of a task."""

    policy: Policy
    runs: list[list[Tally]] = field(default_factory=list[list[Tally]])


_LOANS: dict[str, Loan] = {}


@contextmanager
def lent(policy: Policy) -> Generator[str]:
    """Inside, an agent of this process finds the policy by the key that is given."""
    key = uuid.uuid4().hex
    _LOANS[key] = Loan(policy)
    try:
        yield key
    finally:
        del _LOANS[key]


def ended(key: str) -> AgentEnd:
    """How the agent with this policy ended; to be asked while the policy is lent."""
    return summed([tally for run in loan_of(key).runs for tally in run])


def loan_of(key: str) -> Loan:
    """Return the loan with this key, or raise a UsageError where no policy is lent by it."""
    if key not in _LOANS:
        raise UsageError(f"agent option 'policy': no policy is lent as {key!r} in this process; see rlkit's loans.lent")
    return _LOANS[key]
