"""Errors of HTTP requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from rlkit.errors import ContextFull, EnvironmentFault, LimitReached, RlkitError

type Code = Literal[
    "context_length_exceeded", "invalid_api_key", "not_found", "rollout_limit_reached",
    "unsupported_parameter",
]  # fmt: skip

_DEPTH_MAX = 200  # limit of pydantic's parser

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class Rejection(Exception):
    """A request that gets an error as its response.

    Args:
        message: reason for the client.
        code: kind of the error, where the status does not say it.
        field: parameter of the request that is wrong.
        body: part of the request's body that was read.
    """

    def __init__(
        self, status: int, message: str, *, code: Code | None = None, field: str | None = None, body: bytes = b""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code: Code | None = code
        self.field = field
        self.body = body

    def encode(self) -> Mapping[str, Any]:
        """Return the body of the error, in a shape that the clients of all vendors read."""
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ERROR_TYPES.get(self.status, default)
        return {"type": "error", "error": {"type": kind, "message": str(self), "param": self.field, "code": self.code}}


def explain(error: RlkitError) -> Rejection:
    """Return the rejection for an error of the policy."""
    match error:
        case ContextFull():
            message = f"This model's maximum context length is exceeded: prompt is too long: {error}"
            return Rejection(400, message, code="context_length_exceeded")  # clients look for their vendor's words
        case LimitReached():
            return Rejection(400, str(error), code="rollout_limit_reached")
        case EnvironmentFault():
            return Rejection(400, str(error))
        case _:
            return Rejection(500, str(error))


def explain_parser(message: str) -> str:
    """Return a message of the JSON parser with its limit of levels, which it does not name."""
    return message.replace("recursion limit exceeded", f"lists and objects nested more than {_DEPTH_MAX} levels deep")


def parse_body[M: BaseModel](body: bytes, model: type[M], *, status: int = 400) -> M:
    """Parse a JSON body; a `Rejection` with this status names its first invalid field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        # In a union, the deepest mistake is that of the alternative that the client meant.
        first = max(error.errors(include_url=False, include_input=False), key=lambda mistake: len(mistake["loc"]))
        field = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier())
        message = f"{field or 'body'}: {explain_parser(first['msg'])}"
        raise Rejection(status, message, field=field or None, body=body) from None
