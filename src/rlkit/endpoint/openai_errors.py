"""Errors in the shape of OpenAI's API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rlkit.errors import ContextFull, EnvironmentFault, LimitReached, RlkitError


class Rejection(Exception):
    """A request that gets an error as its response.

    Args:
        status: HTTP status.
        message: reason for the client.
        code: OpenAI's code of the error, if it has one.
        field: parameter of the request that is wrong.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field

    @property
    def body(self) -> dict[str, object]:
        """Content of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


def make_error_response(_: Request, error: Exception) -> Response:
    """Return the response of a rejection; clients must not repeat it, because it would be another turn."""
    assert isinstance(error, Rejection)
    return JSONResponse(error.body, error.status, {"x-should-retry": "false"})


def explain(error: RlkitError | ValueError) -> Rejection:
    """Return the rejection for an error of the policy."""
    match error:
        case ContextFull():
            return Rejection(400, str(error), code="context_length_exceeded", field="messages")
        case LimitReached():
            return Rejection(400, str(error), code="rollout_limit_reached")
        case EnvironmentFault() | ValueError():
            return Rejection(400, str(error))
        case _:
            return Rejection(500, str(error))
