"""How an agent ended: what a rollout's outcome is decided by.

Invariant: what is said first of a run's end holds; one of which nothing was said was stopped from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlkit._util.json_values import escape_surrogates, safe_str
from rlkit.errors import ContextFull, EnvironmentFault, LimitReached, MissingError, ServiceError, UsageError

type Reason = Literal["completed", "max_turns", "overflow", "service_error", "agent_error", "cancelled"]


class EnvironmentDown(EnvironmentFault):
    """The environment failed under the agent, which is not the agent's fault, nor the model's."""


@dataclass(slots=True)
class AgentEnd:
    """The end of an agent's loop, in all steps of its task.

    Args:
        reason: `completed` when the model said that the task is done (to Terminus2, twice), or ended its terminal;
            `max_turns` when it had no more turns; `overflow` when the context was full; `service_error` when the
            service failed after its retries; `agent_error` when the agent's own code failed, or the environment under
            it; `cancelled` when it was stopped from outside, as by a time limit, or never began. Of several steps, the
            first that was not completed.
        turns: replies of the model, those that were cut off included, those of summaries not.
        parse_errors: replies that held no commands in the form that was asked for.
        truncated_turns: replies that `max_tokens` cut off.
        llm_s: seconds that the policy took.
    """

    reason: Reason = "cancelled"
    detail: str = "the agent was stopped from outside"
    turns: int = 0
    parse_errors: int = 0
    truncated_turns: int = 0
    summaries: int = 0
    llm_s: float = 0.0
    error: Exception | None = field(default=None, repr=False, compare=False)


class Tally(AgentEnd):
    """The end of one run of the agent; it is `cancelled` until it ended otherwise."""

    def ended(self, reason: Reason, detail: str, error: Exception | None = None) -> None:
        """Say how; what is said first holds."""
        if self.reason == "cancelled":
            self.reason, self.detail, self.error = reason, escape_surrogates(detail), error

    def ended_by(self, error: Exception) -> None:
        """Say that an exception ended it, and so why."""
        text = str(error)
        match error:
            case ContextFull():
                reason: Reason = "overflow"
            case LimitReached():
                reason = "max_turns"
            case ServiceError():
                reason = "service_error"
            case EnvironmentDown() | UsageError() | MissingError():
                reason = "agent_error"
            case _:
                reason, text = "agent_error", f"{type(error).__name__}: {safe_str(error)}"
        self.ended(reason, text, error)


def sum_tallies(tallies: Sequence[Tally]) -> AgentEnd:
    """How the agent ended, over all its runs."""
    if not tallies:
        return AgentEnd("cancelled", "the agent did not begin")
    first = next((tally for tally in tallies if tally.reason != "completed"), tallies[-1])
    return AgentEnd(
        reason=first.reason,
        detail=first.detail,
        turns=sum(tally.turns for tally in tallies),
        parse_errors=sum(tally.parse_errors for tally in tallies),
        truncated_turns=sum(tally.truncated_turns for tally in tallies),
        summaries=sum(tally.summaries for tally in tallies),
        llm_s=sum(tally.llm_s for tally in tallies),
        error=first.error,
    )
