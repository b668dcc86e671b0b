"""Agents of Harbor whose model is a policy, and the end of their work, on which the outcome of a rollout depends.

    trial = await Trial.create(TrialConfig(agent=AgentConfig(import_path=path, kwargs={"max_turns": 32}), ...))
    trial.agent.policy = policy
    result = await trial.run()
    end = trial.agent.end

Invariant: Harbor writes the settings of an agent to disk, and a policy is none of them. The first recorded end of a run
counts; a run without a recorded end was stopped from outside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlkit._util.json_values import escape_surrogates, safe_str
from rlkit._util.sections import validate_fields
from rlkit.errors import ContextFull, EnvironmentFault, LimitReached, MissingError, ServiceError, UsageError
from rlkit.policy import Policy
from rlkit.types import Json, Turn

if TYPE_CHECKING:
    from harbor.agents.options import AgentOptions
    from harbor.trial.trial import Trial

type Reason = Literal["completed", "max_turns", "overflow", "service_error", "agent_error", "cancelled"]


class EnvironmentDown(EnvironmentFault):
    """The environment failed while the agent ran, through no fault of the agent or the model."""


@dataclass(slots=True)
class AgentEnd:
    """The end of a run of an agent, or of its runs over all steps of a task; `cancelled` until another is recorded."""

    # `completed`: the model reported that the task is done (to Terminus2, twice), or ended its terminal; `max_turns`:
    # no turns are left; `overflow`: the context is full; `service_error`: the service failed after retries;
    # `agent_error`: the agent's own code or the environment failed; `cancelled`: stopped from outside, such as by a
    # time limit, or not started. For several steps, that of the first step that was not completed.
    reason: Reason = "cancelled"
    detail: str = "the agent was stopped from outside"
    turns: int = 0  # number of replies of the model, including truncated replies but not replies for summaries
    parse_errors: int = 0  # number of replies without commands in the required format
    truncated_turns: int = 0  # number of replies truncated by `max_tokens`
    summaries: int = 0
    llm_s: float = 0.0  # seconds of the policy's replies
    error: Exception | None = field(default=None, repr=False, compare=False)

    def count_turns(self, turns: Sequence[Turn]) -> None:
        """Count the turns of the policy in this run, all of which are the agent's own."""
        self.turns, self.llm_s = len(turns), sum(turn.seconds for turn in turns)
        self.truncated_turns = sum(turn.stop == "length" for turn in turns)

    def record(self, reason: Reason, detail: str, error: Exception | None = None) -> None:
        """Record the end, unless an end is already recorded."""
        if self.reason == "cancelled":
            self.reason, self.detail, self.error = reason, escape_surrogates(detail), error

    def record_error(self, error: Exception, log: logging.Logger) -> None:
        """Record the end by an exception; raise it if no verifier can run then, or if a retry cannot fix it."""
        text = str(error)
        match error:
            case ContextFull():
                reason: Reason = "overflow"
            case LimitReached():
                reason = "max_turns"
            case ServiceError():
                reason = "service_error"
            case EnvironmentDown() | UsageError() | MissingError():
                self.record("agent_error", text, error)
                raise error
            case _:
                log.error("the agent's own code failed", exc_info=error)
                reason, text = "agent_error", f"{type(error).__name__}: {safe_str(error)}"
        self.record(reason, text, error)


def join_ends(ends: Sequence[AgentEnd]) -> AgentEnd:
    """Return the end of an agent over all its runs."""
    if not ends:
        return AgentEnd("cancelled", "the agent was not started")
    first = next((end for end in ends if end.reason != "completed"), ends[-1])
    return replace(
        first,
        turns=sum(end.turns for end in ends),
        parse_errors=sum(end.parse_errors for end in ends),
        truncated_turns=sum(end.truncated_turns for end in ends),
        summaries=sum(end.summaries for end in ends),
        llm_s=sum(end.llm_s for end in ends),
    )


class PolicyAgent:
    """An agent of a trial, whose policy is set before the trial runs."""

    options_model: ClassVar[type[AgentOptions] | None]

    @classmethod
    def parse_options(cls, kwargs: dict[str, Any] | None = None, env: Mapping[str, str] | None = None) -> Any:
        """Return the options; UsageError that names the first invalid one."""
        assert cls.options_model is not None
        return validate_fields(cls.options_model, kwargs or {}, place="agent options")

    @cached_property
    def policy(self) -> Policy:
        """The policy; UsageError if none is set."""
        raise UsageError("the agent has no policy: set `trial.agent.policy` before `trial.run()`")

    @cached_property
    def ends(self) -> list[AgentEnd]:
        """Ends of the agent's runs: one per step of a task."""
        return []

    @property
    def end(self) -> AgentEnd:
        """End of the agent's work so far."""
        return join_ends(self.ends)


@dataclass(frozen=True)
class AgentAccess:
    """An agent that can play a trial while it has a policy."""

    fields: Mapping[str, Json]  # fields of Harbor's `AgentConfig`
    ends: Sequence[AgentEnd]  # ends of the agent's runs so far
    prepare: Callable[[Trial], None]  # called with the trial before it runs


def give_policy(policy: Policy, *, import_path: str, options: Mapping[str, Json]) -> AgentAccess:
    """Return the access to an agent of rlkit, which gets the policy."""
    ends = list[AgentEnd]()

    def prepare(trial: Trial) -> None:
        assert isinstance(trial.agent, PolicyAgent)
        trial.agent.policy, trial.agent.ends = policy, ends

    return AgentAccess({"import_path": import_path, "kwargs": {**options}}, ends, prepare)


def limit_reply(policy: Policy, max_tokens: int | None) -> tuple[int, int]:
    """Return the limit of a reply's tokens, and the tokens to reserve for it: at most a quarter of the context."""
    limit, context = min(max_tokens or policy.max_tokens, policy.max_tokens), policy.context_tokens
    return limit, limit if context is None else min(limit, max(context // 4, 1))


def count_tokens(turns: Sequence[Turn], start: int) -> tuple[int, int]:
    """Return the tokens of the prompts and of the completions of all turns after the first `start`."""
    lengths, completions = list[int](), [len(turn.completion) for turn in turns]
    for turn in turns:
        prefix = 0 if turn.parent is None else lengths[turn.parent]
        lengths.append(prefix + len(turn.prompt) + len(turn.completion))
    output = sum(completions[start:])
    return sum(lengths[start:]) - output, output
