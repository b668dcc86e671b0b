"""The bodies of requests: read, unpacked and parsed.

Invariant: no more than a given number of bytes is ever kept, packed or not, and what cannot be read is `Refused`.
"""

from __future__ import annotations

import zstandard
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

_ZSTD_STEP_BYTES = 256


class Refused(Exception):
    """A request that gets a status of its own; `body` is what was read of it."""

    def __init__(self, status: int, message: str, body: bytes | bytearray = b"") -> None:
        super().__init__(message)
        self.status = status
        self.body = bytes(body)


class _Place(BaseModel):
    """Where a request stands in its model's line, which can be read even if the rest cannot."""

    model_id: str
    seq_id: int


async def read_body(request: Request, *, bytes_max: int) -> bytearray:
    """The body as it comes.

    Raises:
        Refused: it is larger than `bytes_max`.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            raise _too_large(body, bytes_max)
    return body


def unpack_body(body: bytearray, *, bytes_max: int) -> bytes:
    """A body that came in zstd.

    Raises:
        Refused: it is not one whole frame, or larger than `bytes_max`.
    """
    # It is fed in small steps, because one step may come to many times its size.
    reader = zstandard.ZstdDecompressor(max_window_size=bytes_max).decompressobj()
    plain = bytearray()
    try:
        for start in range(0, len(body), _ZSTD_STEP_BYTES):
            plain += reader.decompress(body[start : start + _ZSTD_STEP_BYTES])
            if len(plain) > bytes_max:
                raise _too_large(plain, bytes_max)
    except zstandard.ZstdError as error:
        raise Refused(400, f"the body is not zstd as its Content-Encoding says: {error}") from error
    if not reader.eof or reader.unused_data:
        raise Refused(400, "the body is not one whole zstd frame")
    return bytes(plain)


def parse_body[M: BaseModel](body: bytes, model: type[M]) -> M:
    """A body in JSON as `model`.

    Raises:
        Refused: names the first field that does not fit.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise Refused(422, f"{field or 'body'}: {first['msg']}", body) from error


def json_place(body: bytes) -> tuple[str, int] | None:
    """The model and `seq_id` of a body in JSON that is otherwise wrong; None if they are wrong too."""
    try:
        place = _Place.model_validate_json(body)
    except ValidationError:
        return None
    return place.model_id, place.seq_id


def _too_large(body: bytearray, bytes_max: int) -> Refused:
    return Refused(413, f"the body is larger than {bytes_max} bytes", body)
