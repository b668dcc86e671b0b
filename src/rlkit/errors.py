"""Every error that rlkit raises on purpose.

    RlkitError
    ├── UsageError            the caller made a mistake: names the field or file, and the fix (exit 2)
    │   └── ConfigError       a value of a configuration is wrong
    ├── MissingError          something must be installed, downloaded or logged in to (exit 3)
    │   └── ServiceUnreachable  no session could be opened with the Tinker service
    ├── ServiceError          the Tinker service failed after retries; carries the request id (exit 1)
    ├── EnvironmentFault      an environment failed an episode: recorded and retried, never rewarded
    │   └── RewardError       an environment returned something other than a finite number
    ├── LimitReached          a rollout requested more turns or tokens than allowed: catch it to grade the result so far
    │   └── ContextFull       the context has no room for a reply
    └── RunFailed             a run cannot continue; everything finished is saved (exit 1)
        └── RolloutsFailed    too many rollouts failed; they are played again when the run resumes

Exit codes belong to the classes, so that the command line needs no table of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RlkitError(Exception):
    """Base class of rlkit's errors; `str(error)` is a message for the user."""

    exit_code = 1


class UsageError(RlkitError):
    """A mistake of the caller. The message names the field or file, and the fix."""

    exit_code = 2


class ConfigError(UsageError):
    """An unknown, ill-typed or contradictory value in a configuration."""


class BudgetReached(UsageError):
    """A limit of spending beside the run's own, such as a judge's, is reached."""

    exit_code = 4


class MissingError(RlkitError):
    """A package, model or credential is missing."""

    exit_code = 3


class ServiceUnreachable(MissingError):
    """No session could be opened with the Tinker service. The message has the address and the reason."""


class ServiceError(RlkitError):
    """The Tinker service failed after retries.

    Args:
        message: the request and the reason.
        request_id: the service's id of the failed request, if any.
    """

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(f"{message} (request {request_id})" if request_id else message)
        self.request_id = request_id


class EnvironmentFault(RlkitError):
    """An environment could not finish an episode. The episode is `failed` and has no reward."""


class RewardError(EnvironmentFault):
    """An environment returned a reward that is not a finite number."""


class LimitReached(RlkitError):
    """A rollout requested more turns or tokens than allowed. Uncaught, it fails the episode."""


class ContextFull(LimitReached):
    """The context has no room for a reply."""


class RunFailed(RlkitError):
    """A run cannot continue. Its directory holds everything finished."""


class RolloutsFailed(RunFailed):
    """Too many rollouts failed. A resumed run plays them again."""


DISTRIBUTION = "rlkit-tinker"
"""Name of this package on a package index, where `rlkit` is another library."""

EXTRAS = {
    "beaker": "beaker",
    "daytona": "daytona",
    "docent": "docent",
    "e2b": "e2b",
    "math_verify": "math-verify",
    "matplotlib": "discovery",
    "modal": "modal",
    "ray": "ray",
    "runloop_api_client": "runloop",
    "scipy": "discovery",
    "trackio": "trackio",
}
"""Extra of rlkit that installs each optional module."""


def show_install(extra: str) -> str:
    """Return the commands that install an extra: in a clone, and from an index."""
    return f"`uv sync --extra {extra}`, or `pip install '{DISTRIBUTION}[{extra}]'`"


def missing_extra(module: str) -> MissingError:
    """Return the error for an optional module that is not installed, with the command that installs it."""
    return MissingError(f"{module} is not installed: run {show_install(EXTRAS[module])}")


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` with the candidate nearest to `word`, or an empty string."""
    near = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
