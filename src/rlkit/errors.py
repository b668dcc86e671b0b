"""Everything rlkit raises on purpose.

    RlkitError
    ├── UsageError            what the caller gave is wrong: one line that names the field or file and the fix (exit 2)
    │   └── ConfigError       a value of a configuration
    ├── MissingError          something that must be installed, downloaded or logged in to is not there (exit 3)
    │   └── ServiceUnreachable  no session could be opened with the Tinker service
    ├── ServiceError          the Tinker service failed after its retries; carries the request id (exit 1)
    ├── EnvironmentFault      an environment failed an episode: never a reward (recorded, then retried)
    │   └── RewardError       an environment returned something that is not a finite number
    ├── LimitReached          a rollout asked for more turns or tokens than it may: catch it to grade what is there
    │   └── ContextFull       …and it was the context that had no room for a reply
    └── RunFailed             a run cannot go on; what is finished is saved (exit 1)
        └── RolloutsFailed    too many rollouts failed; they are played again when the run is resumed

Exit codes belong to the classes so that the command line maps them without a table of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RlkitError(Exception):
    """Base of every error that rlkit raises on purpose; `str(error)` is fit to be shown to a user."""

    exit_code = 1


class UsageError(RlkitError):
    """The caller gave something wrong. The message names the field or file and says how to mend it."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration holds an unknown, ill-typed or contradictory value."""


class MissingError(RlkitError):
    """Something that has to be installed, downloaded or logged in to is missing."""

    exit_code = 3


class ServiceUnreachable(MissingError):
    """No session could be opened with the Tinker service. The message has its address and the reason."""


class ServiceError(RlkitError):
    """The Tinker service failed after retries.

    Args:
        message: what was asked and what came back.
        request_id: the service's id of the failed request, if it gave one.
    """

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(f"{message} (request {request_id})" if request_id else message)
        self.request_id = request_id


class EnvironmentFault(RlkitError):
    """An environment could not finish an episode. The episode is `failed` and has no reward."""


class RewardError(EnvironmentFault):
    """An environment returned a reward that is not a finite number."""


class LimitReached(RlkitError):
    """A rollout asked for more turns or a longer context than it may have.

    An environment that catches it can grade what is there; one that does not ends the episode as `failed`.
    """


class ContextFull(LimitReached):
    """The context has no room for the reply that a rollout asks for."""


class RunFailed(RlkitError):
    """A run cannot go on. Everything that was finished is in the run directory."""


class RolloutsFailed(RunFailed):
    """Too many rollouts failed. A run that is resumed plays them again, as if for the first time."""


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
"""Importable modules that are optional, and the extra of rlkit that brings each."""


def missing_extra(module: str) -> MissingError:
    """The error for an optional module that is not installed, with the command that installs it."""
    extra = EXTRAS[module]
    return MissingError(f"{module} is not installed: run `uv sync --extra {extra}` (or `pip install '.[{extra}]'`)")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest of `known`, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
