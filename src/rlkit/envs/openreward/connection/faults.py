"""Classification of failures of a session.

    model           invalid call; the model receives the error
    environment     a tool or setup raised an error; the episode fails
    busy            the server is overloaded; the request was not executed
    infrastructure  the session is lost, and the last request may have been executed; a new session is needed
    configuration   every session would fail; the run stops

Invariant: a request that may have been executed is never repeated in the same session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from rlkit.errors import UsageError

if TYPE_CHECKING:
    import aiohttp

type Kind = Literal["model", "environment", "busy", "infrastructure", "configuration"]

BUSY = 429
_REFUSALS = {
    401: "the API key is missing or invalid: set OPENREWARD_API_KEY",
    402: "the account has no credit left",
    403: "the API key does not give access to it",
}
_LOST = frozenset({404, 408, 410, 502, 503, 504})
_UNKNOWN = ("deployment not found", "unknown environment")
_UNKNOWN_TASK = "unknown task_id"  # message of a restarted server about a call from before the restart


class SessionLost(Exception):
    """A session failed, or could not be opened; `busy` if the server was overloaded."""

    def __init__(self, message: str, *, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


def classify_error(error: BaseException, *, opening: bool) -> Kind:
    """Classify the exception of a request; an error 400 while `opening` a session concerns the task, not the call."""
    import aiohttp
    from openreward.api.errors import MaxRetriesError, ToolCallError, ToolFailed
    from openreward.api.errors import OpenRewardError as SDKError

    match error:
        case ToolCallError():
            return "model"
        case ToolFailed():
            return "infrastructure" if _UNKNOWN_TASK in error.message else "environment"
        case MaxRetriesError():
            is_busy = any(getattr(cause, "status", None) == BUSY for cause in error.errors)
            return "busy" if is_busy else "infrastructure"
        case aiohttp.ClientResponseError():
            return _classify_status(error, opening)
        case SDKError() | aiohttp.ClientError() | OSError():  # a TimeoutError is an OSError
            return "infrastructure"
        case _:
            return "configuration" if type(error).__name__ == "AuthenticationError" else "environment"


def _classify_status(error: aiohttp.ClientResponseError, opening: bool) -> Kind:
    text = error.message.lower()
    if error.status == BUSY:
        return "busy"
    if error.status in _REFUSALS or any(phrase in text for phrase in _UNKNOWN):
        return "configuration"
    if error.status == 400 and opening:
        # The SDK repeated a request that had been executed.
        return "infrastructure" if "already exists" in text else "configuration"
    return "infrastructure" if error.status in _LOST else "environment"


def describe_error(error: BaseException, clean: Callable[[str], str] = str) -> str:
    """Describe an exception in one line, without secrets."""
    status = getattr(error, "status", None)
    if status in _REFUSALS:
        return _REFUSALS[status]
    if type(error).__name__ == "AuthenticationError":  # its text is a page with colour codes
        return _REFUSALS[401]
    text = str(getattr(error, "message", "") or getattr(error, "detail", "") or error)
    line = " ".join(clean(text).split())
    name = type(error).__name__ if status is None else f"HTTP {status}"
    return f"{name}: {line}" if line else name


def configuration_error(target: str, error: BaseException, clean: Callable[[str], str] = str) -> UsageError:
    """Return the error that stops a run."""
    return UsageError(f"target: {target}: {describe_error(error, clean)}")
