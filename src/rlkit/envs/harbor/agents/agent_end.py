"""End of an agent's work, on which the outcome of a rollout depends.

Invariant: the first recorded end of a run counts; a run without a recorded end was stopped from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlkit._util.json_values import escape_surrogates, safe_str
from rlkit.errors import ContextFull, EnvironmentFault, LimitReached, MissingError, ServiceError, UsageError
from rlkit.types import Turn

type Reason = Literal["completed", "max_turns", "overflow", "service_error", "agent_error", "cancelled"]


class EnvironmentDown(EnvironmentFault):
    """The environment failed while the agent ran, through no fault of the agent or the model."""


@dataclass(slots=True)
class AgentEnd:
    """The end of an agent's loop, over all steps of its task."""

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


class Tally(AgentEnd):
    """End of one run of the agent; `cancelled` until another end is recorded."""

    def count_turns(self, turns: Sequence[Turn]) -> None:
        """Count the turns of the policy in this run, all of which are the agent's own."""
        self.turns, self.llm_s = len(turns), sum(turn.seconds for turn in turns)
        self.truncated_turns = sum(turn.stop == "length" for turn in turns)

    def record_end(self, reason: Reason, detail: str, error: Exception | None = None) -> None:
        """Record the end, unless an end is already recorded."""
        if self.reason == "cancelled":
            self.reason, self.detail, self.error = reason, escape_surrogates(detail), error

    def record_error(self, error: Exception) -> None:
        """Record the end by an exception."""
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
        self.record_end(reason, text, error)


def sum_tallies(tallies: Sequence[Tally]) -> AgentEnd:
    """Return the end of the agent over all its runs."""
    if not tallies:
        return AgentEnd("cancelled", "the agent was not started")
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


def count_tokens(turns: Sequence[Turn], start: int) -> tuple[int, int]:
    """Return the tokens of the prompts and of the completions of all turns after the first `start`."""
    lengths, completions = list[int](), [len(turn.completion) for turn in turns]
    for turn in turns:
        prefix = 0 if turn.parent is None else lengths[turn.parent]
        lengths.append(prefix + len(turn.prompt) + len(turn.completion))
    output = sum(completions[start:])
    return sum(lengths[start:]) - output, output
