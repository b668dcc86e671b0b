"""Whose fault it is when a session fails.

    model           a call that cannot be made as it was written: told to the model
    environment     a tool or a setup that raised: the episode has failed
    busy            the server asks for patience: nothing was carried out
    infrastructure  the session is lost, and what the last request did is not known: a fresh session
    configuration   no other session would fare better: the run stops

Invariant: a request of which nobody knows whether it was carried out is never made again in the same session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from rlkit.errors import UsageError

if TYPE_CHECKING:
    import aiohttp

type Kind = Literal["model", "environment", "busy", "infrastructure", "configuration"]

_BUSY = 429
_REFUSED = {
    401: "the API key is missing or refused: set OPENREWARD_API_KEY",
    402: "the account has no credit left",
    403: "the API key may not use it",
}
_LOST = frozenset({404, 408, 410, 502, 503, 504})
_UNKNOWN = ("deployment not found", "unknown environment")
_UNKNOWN_TASK = "unknown task_id"
"""What a server that was restarted says of a call that it was running before."""


class SessionLost(Exception):
    """A session failed, or could not be opened; `busy` where the server asked for patience."""

    def __init__(self, message: str, *, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


def kind_of(error: BaseException, *, opening: bool) -> Kind:
    """Return whose fault the exception is that a request to a server ended with.

    While the session is `opening`, its task may be refused, and not what the model did.
    """
    import aiohttp
    from openreward.api.errors import MaxRetriesError, ToolCallError, ToolFailed
    from openreward.api.errors import OpenRewardError as SDKError

    match error:
        case ToolCallError():
            return "model"
        case ToolFailed():
            return "infrastructure" if _UNKNOWN_TASK in error.message else "environment"
        case MaxRetriesError():
            return "busy" if any(getattr(one, "status", None) == _BUSY for one in error.errors) else "infrastructure"
        case aiohttp.ClientResponseError():
            return _of_status(error, opening)
        case SDKError() | aiohttp.ClientError() | OSError():  # a TimeoutError is an OSError
            return "infrastructure"
        case _:
            return "configuration" if type(error).__name__ == "AuthenticationError" else "environment"


def _of_status(error: aiohttp.ClientResponseError, opening: bool) -> Kind:
    said = error.message.lower()
    if error.status == _BUSY:
        return "busy"
    if error.status in _REFUSED or any(phrase in said for phrase in _UNKNOWN):
        return "configuration"
    if error.status == 400 and opening:
        # The SDK made the request again, and the first one had been carried out.
        return "infrastructure" if "already exists" in said else "configuration"
    return "infrastructure" if error.status in _LOST else "environment"


def describe_error(error: BaseException, clean: Callable[[str], str] = str) -> str:
    """An exception in one line, without secrets."""
    status = getattr(error, "status", None)
    if status in _REFUSED:
        return _REFUSED[status]
    if type(error).__name__ == "AuthenticationError":  # its text is a page, in colours
        return _REFUSED[401]
    text = str(getattr(error, "message", "") or getattr(error, "detail", "") or error)
    line = " ".join(clean(text).split())
    name = type(error).__name__ if status is None else f"HTTP {status}"
    return f"{name}: {line}" if line else name


def configuration_error(target: str, error: BaseException, clean: Callable[[str], str] = str) -> UsageError:
    """The error that stops a run."""
    return UsageError(f"target: {target}: {describe_error(error, clean)}")
