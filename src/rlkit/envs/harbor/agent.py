"""`RLTerminus2`: the agent of a rollout, which Harbor makes by name, and a policy that it finds by a key.

    with lent(policy) as key:
        agent = AgentConfig(import_path="rlkit.envs.harbor.agent:RLTerminus2", kwargs={"policy": key, "max_turns": 32})
        result = await (await Trial.create(TrialConfig(agent=agent, ...))).run()
        end = ended(key)

Invariant: Harbor is given JSON only, which it writes to the disk. A policy is in the register only while it is lent.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast, override

from harbor.llms.base import BaseLLM
from pydantic import Field

from rlkit.envs.harbor.ending import AgentEnd, Tally, summed
from rlkit.envs.harbor.llm import PolicyLLM
from rlkit.envs.harbor.terminus import PolicyOptions, PolicyTerminus2
from rlkit.errors import UsageError
from rlkit.policy import Policy

__all__ = ["AgentEnd", "RLTerminus2", "ended", "lent"]


@dataclass(frozen=True, slots=True, eq=False)
class _Loan:
    policy: Policy
    runs: list[list[Tally]] = field(default_factory=list[list[Tally]])


_LOANS: dict[str, _Loan] = {}


@contextmanager
def lent(policy: Policy) -> Generator[str]:
    """Inside, an agent of this process finds the policy by the key that is given."""
    key = uuid.uuid4().hex
    _LOANS[key] = _Loan(policy)
    try:
        yield key
    finally:
        del _LOANS[key]


def ended(key: str) -> AgentEnd:
    """How the agent with this policy ended; to be asked while the policy is lent."""
    return summed([tally for run in _loan(key).runs for tally in run])


def _loan(key: str) -> _Loan:
    if key not in _LOANS:
        raise UsageError(f"agent option 'policy': no policy is lent as {key!r} in this process; see rlkit's agent.lent")
    return _LOANS[key]


class _Options(PolicyOptions):
    policy: str = Field(description="Key of a policy that is lent in this process.")


class RLTerminus2(PolicyTerminus2):
    """Terminus2 with a policy of this process; see `PolicyTerminus2` for its options, and `policy`, the key."""

    options_model = _Options

    @override
    def _init_llm(self, *args: object, **kwargs: object) -> BaseLLM:
        options = cast("_Options", self.options)
        loan = _loan(options.policy)
        loan.runs.append(self.tallies)
        self._policy_llm = PolicyLLM(
            loan.policy,
            model_name=self._model_name,
            max_tokens=options.max_tokens,
            reserve_tokens=options.reserve_tokens,
            temperature=options.temperature,
        )
        return self._policy_llm
