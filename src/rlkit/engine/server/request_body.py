"""The bodies of requests: read, unpacked and parsed.

Invariant: no more than a given number of bytes is ever kept, packed or not, and what cannot be read is `Refused`.
"""

from __future__ import annotations

import asyncio

import zstandard
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

_BODY_BYTES_MAX = 64 << 20
# Nothing else is answered while JSON is parsed, which takes half a microsecond a number. A prompt of 131,072 tokens
# comes to a mebibyte at most.
JSON_BYTES_MAX = 2 << 20
# So much of a body that is too large is read and thrown away, because clients send all of it before they read why it
# was refused, and would find the connection closed.
_DISCARDED_BYTES_MAX = 256 << 20
_ZSTD_STEP_BYTES = 256


class Refused(Exception):
    """A request that gets a status of its own; `body` is what was read of it."""

    def __init__(self, status: int, message: str, body: bytes | bytearray = b"") -> None:
        super().__init__(message)
        self.status = status
        self.body = bytes(body)


class _Place(BaseModel):
    model_id: str
    seq_id: int


class Bodies:
    """Reads the bodies of a server's requests. Used from the server's own thread only."""

    def __init__(self) -> None:
        self._coming: set[asyncio.Timeout] = set()
        self._wait_s: float | None = None

    async def read(self, request: Request, bytes_max: int | None = None) -> bytes:
        """Receive a body and unpack it.

        Raises:
            Refused: it is too large, or packed in a way that is not known, or it did not come before `close`.
        """
        bytes_max = bytes_max or _BODY_BYTES_MAX
        try:
            async with asyncio.timeout(self._wait_s) as timeout:
                self._coming.add(timeout)
                try:
                    body = await read_body(request, bytes_max=bytes_max)
                finally:
                    self._coming.discard(timeout)
        except TimeoutError:
            raise Refused(503, "the engine was stopped") from None
        encoding = request.headers.get("content-encoding", "identity")
        if encoding == "zstd":
            return await asyncio.to_thread(unpack_body, body, bytes_max=bytes_max)
        if encoding != "identity":
            raise Refused(415, f"Content-Encoding {encoding!r} is not supported; use zstd or none")
        return bytes(body)

    async def parse[M: BaseModel](self, request: Request, model: type[M]) -> M:
        """Read a body in JSON as `model`; raises as `read` and `parse_body`."""
        return parse_body(await self.read(request, JSON_BYTES_MAX), model)

    def close(self) -> None:
        """Give up what is still coming, so that a client that has stopped sending holds up nobody."""
        self._wait_s = 0.0
        for timeout in self._coming:
            timeout.reschedule(asyncio.get_running_loop().time())


async def read_body(request: Request, *, bytes_max: int) -> bytearray:
    """Receive a body as it comes; one larger than `bytes_max` is `Refused`."""
    body, size_bytes = bytearray(), 0
    async for chunk in request.stream():
        size_bytes += len(chunk)
        body += chunk[: bytes_max - len(body)]
        if size_bytes > _DISCARDED_BYTES_MAX:
            break
    if size_bytes > bytes_max:
        raise _too_large(body, bytes_max)
    return body


def unpack_body(body: bytearray, *, bytes_max: int) -> bytes:
    """Unpack a body in zstd; what is not one whole frame, or larger than `bytes_max`, is `Refused`."""
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
    """Parse a body in JSON as `model`; `Refused` names the first field that does not fit."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise Refused(422, f"{field or 'body'}: {first['msg']}", body) from error


def json_place(body: bytes) -> tuple[str, int] | None:
    """Return the model and `seq_id` of a body in JSON that is otherwise wrong; None if they are wrong too."""
    try:
        place = _Place.model_validate_json(body)
    except ValidationError:
        return None
    return place.model_id, place.seq_id


def _too_large(body: bytearray, bytes_max: int) -> Refused:
    return Refused(413, f"the body is larger than {bytes_max} bytes", body)
