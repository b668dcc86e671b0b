"""End of a run and its remedy, read from the run's directory.

Invariant: every kind of end has a remedy; a run without a record of its end was killed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlkit.store import jsonl
from rlkit.store.lock import find_lock_holder

type Way = Literal["completed", "interrupted", "budget", "failed", "running", "killed"]

_FAILURES = {
    "ServiceError": "see whether the service answers (`rlkit doctor`), then {resume}",
    "RolloutsFailed": "mend the environment, then {resume}: what failed is played again",
    "EnvironmentFault": "mend the environment, its task source or the estimator, then {resume}",
    "RewardError": "mend what the environment returns, then {resume}",
    "ServiceUnreachable": "see that TINKER_BASE_URL or service.base_url is right and answers, then {resume}",
    "MissingError": "install, fetch or log in to what is missing, then {resume}",
    "UsageError": "change what the message names, then {resume}",
    "ConfigError": "change what the message names, then {resume}",
    "RunFailed": "remove the cause that the message names, then {resume}",
    "OSError": "see that the disk can be written, then {resume}",
}
"""Remedies by the name of the error's class."""

_ELSEWHERE = frozenset(
    ["ServiceError", "ServiceUnreachable", "RolloutsFailed", "MissingError", "UsageError", "ConfigError", "RunFailed"]
)
"""Errors whose cause is not at the line that raised them."""


@dataclass(frozen=True, slots=True)
class RunEnding:
    """End of a run, or its state while it is running.

    Args:
        way: manner of the end; `killed` if run.json says running and no process holds the run.
        reason: one line; for a failed run the type and the message of its error.
        place: line of code that raised the error, in the user's code if possible; may be empty.
        action: remedy; empty if none is needed.
    """

    way: Way
    reason: str
    place: str = ""
    action: str = ""

    def __str__(self) -> str:
        return f"{self.reason}, at {self.place}" if self.place else self.reason


def read_run_ending(directory: Path) -> RunEnding | None:
    """Return how the run in a directory ended, or that it is running; None if run.json has no status.

    Raises:
        UsageError: run.json is damaged.
    """
    about = jsonl.read_object(directory / "run.json")
    status, reason = about.get("status"), str(about.get("reason") or "")
    resume = f"`rlkit resume {directory.name}`"
    match status:
        case "completed":
            ending = RunEnding("completed", reason or "it has taken all its steps")
        case "budget":
            limit = reason.partition(":")[0]
            raised = f"`rlkit resume {directory.name} {limit}=…`" if limit else resume
            ending = RunEnding("budget", reason or "its budget is used up", action=f"raise the limit: {raised}")
        case "interrupted":
            ending = RunEnding("interrupted", "a signal (Ctrl-C or SIGTERM) or its caller stopped it", action=resume)
        case "failed":
            error, place = str(about.get("error") or "it failed"), str(about.get("place") or "")
            user_place = place if about.get("place_is_own") is True else ""
            kind = error.partition(":")[0]
            line = user_place if kind in _FAILURES else place  # for an unexpected error a line of rlkit helps, too
            ending = RunEnding("failed", error, line, _remedy(kind, user_place, resume))
        case "running" if (process := find_lock_holder(directory)) is not None:
            ending = RunEnding("running", f"process {process} works on it")
        case "running":
            reason = "it ended without a word, likely killed: by kill -9 or for want of memory"
            look = "look whether the machine restarted or ran out of memory (`dmesg | grep -i oom`)"
            ending = RunEnding("killed", reason, action=f"{look}, then {resume}: nothing that was finished is lost")
        case _:
            ending = None
    return ending


def _remedy(kind: str, place: str, resume: str) -> str:
    """Return the remedy for an error of the class `kind`, raised at a place in the user's code if not empty."""
    if place and kind not in _ELSEWHERE:
        return f"mend {place}, then {resume}"
    if kind in _FAILURES:
        return _FAILURES[kind].format(resume=resume)
    return f"this may be a bug in rlkit: report it, with the bug-*.txt in the folder of runs; {resume} tries again"
