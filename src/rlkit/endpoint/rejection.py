"""Errors of requests at an endpoint, before a protocol gives them its shape."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ValidationError

from rlkit.errors import ContextFull, EnvironmentFault, LimitReached, RlkitError

type Code = Literal[
    "context_length_exceeded", "invalid_api_key", "not_found", "rollout_limit_reached", "unknown_parameter",
    "unsupported_value",
]  # fmt: skip


class Rejection(Exception):
    """A request that gets an error as its response.

    Args:
        status: HTTP status.
        message: reason for the client.
        code: kind of the error, where the status does not say it.
        field: parameter of the request that is wrong.
    """

    def __init__(self, status: int, message: str, *, code: Code | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code: Code | None = code
        self.field = field


def explain(error: RlkitError | ValueError) -> Rejection:
    """Return the rejection for an error of the policy."""
    match error:
        case ContextFull():
            return Rejection(400, str(error), code="context_length_exceeded")
        case LimitReached():
            return Rejection(400, str(error), code="rollout_limit_reached")
        case EnvironmentFault() | ValueError():
            return Rejection(400, str(error))
        case _:
            return Rejection(500, str(error))


def parse_body[M: BaseModel](body: bytes, model: type[M]) -> M:
    """Parse a JSON body; a `Rejection` names its first invalid field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise Rejection(400, f"{field}: {first['msg']}" if field else first["msg"], field=field or None) from None
