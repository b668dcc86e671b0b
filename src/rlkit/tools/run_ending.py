"""Outcome of a run and how to fix it, read from the run's directory.

Invariant: every unsuccessful outcome has a fix. A run without a recorded outcome was killed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlkit._util.files import json_lines
from rlkit.store import find_lock_holder

type EndingStatus = Literal["completed", "interrupted", "budget", "failed", "running", "killed"]

_FAILURES = {
    "ServiceError": "check that the service answers (`rlkit doctor`), then {resume}",
    "RolloutsFailed": "fix the environment, then {resume}: failed rollouts are repeated",
    "EnvironmentFault": "fix the environment, its task source or the estimator, then {resume}",
    "RewardError": "fix the return value of the environment, then {resume}",
    "ServiceUnreachable": "check TINKER_BASE_URL or service.base_url, and that the service answers, then {resume}",
    "MissingError": "install, download or log in as the message says, then {resume}",
    "UsageError": "correct the setting in the message, then {resume}",
    "ConfigError": "correct the setting in the message, then {resume}",
    "RunFailed": "fix the cause in the message, then {resume}",
    "OSError": "check that the disk is writable, then {resume}",
}
"""Fixes by the class name of the error."""

_ERRORS_OF_CODE = ("EnvironmentFault", "RewardError", "OSError")
"""The failures among them whose cause is in the line of code that raised them."""


@dataclass(frozen=True, slots=True)
class RunEnding:
    """Outcome of a run that ended, or its state while it is running."""

    status: EndingStatus  # `killed` if run.json says `running` but no process holds the run's lock
    reason: str  # one line; for a failed run the type and the message of its error
    place: str = ""  # line of code that raised the error, in the user's code if possible; "" if unknown
    action: str = ""  # fix; "" if none is needed

    def __str__(self) -> str:
        return f"{self.reason}, at {self.place}" if self.place else self.reason


def read_run_ending(directory: Path) -> RunEnding | None:
    """Return a run's outcome; None if run.json has no status, UsageError if it is damaged."""
    about = json_lines.read_object(directory / "run.json")
    status, reason = about.get("status"), str(about.get("reason") or "")
    resume = f"`rlkit resume {directory.name}`"
    match status:
        case "completed":
            ending = RunEnding("completed", reason or "all steps are done")
        case "budget":
            limit = reason.partition(":")[0]  # the reason starts with the limit's key
            raised = f"`rlkit resume {directory.name} {limit}=…`" if limit else resume
            ending = RunEnding("budget", reason or "its budget is used up", action=f"raise the limit: {raised}")
        case "interrupted":
            ending = RunEnding("interrupted", "a signal (Ctrl-C or SIGTERM) or its caller stopped it", action=resume)
        case "failed":
            error, place = str(about.get("error") or "it failed"), str(about.get("place") or "")
            user_place = place if about.get("place_is_own") is True else ""
            kind = error.partition(":")[0]
            line = user_place if kind in _FAILURES else place  # for an unexpected error, a line of rlkit also helps
            ending = RunEnding("failed", error, line, _remedy(kind, user_place, resume))
        case "running" if (process := find_lock_holder(directory)) is not None:
            ending = RunEnding("running", f"process {process} is running it")
        case "running":
            reason = "it ended without a record: probably killed (kill -9 or out of memory)"
            check = "check whether the machine restarted or ran out of memory (`dmesg | grep -i oom`)"
            ending = RunEnding("killed", reason, action=f"{check}, then {resume}: finished rollouts are not lost")
        case _:
            ending = None
    return ending


def _remedy(kind: str, place: str, resume: str) -> str:
    """Return the fix for an error of class `kind`; `place` is the line of the user's code that raised it, or ""."""
    if place and (kind in _ERRORS_OF_CODE or kind not in _FAILURES):
        return f"fix {place}, then {resume}"
    if kind in _FAILURES:
        return _FAILURES[kind].format(resume=resume)
    return f"this may be a bug in rlkit: report it with the bug-*.txt in the folder of runs; {resume} retries"
