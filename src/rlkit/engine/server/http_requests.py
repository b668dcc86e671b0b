"""Bodies of incoming HTTP requests: reading, unpacking and parsing.

Invariant: the memory for a body, compressed or not, is limited. A body that cannot be read raises `Rejection`.
"""

from __future__ import annotations

import asyncio

import zstandard
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from rlkit.endpoint.rejection import Rejection, parse_body

_BODY_BYTES_MAX = 64 << 20
# Parsing JSON blocks all other requests, and takes half a microsecond per number. A prompt of 131,072 tokens takes at
# most a mebibyte.
JSON_BYTES_MAX = 2 << 20
# Maximum bytes read and dropped of a body that is too large. Clients send all of it before they read the error.
_DISCARDED_BYTES_MAX = 256 << 20
_ZSTD_STEP_BYTES = 256
INVALID = 422


class _RequestPosition(BaseModel):
    model_id: str
    seq_id: int


class BodyReader:
    """Reader of the bodies of a server's requests. Used from the server's own thread only."""

    def __init__(self) -> None:
        self._timeouts: set[asyncio.Timeout] = set()
        self._wait_s: float | None = None

    async def read(self, request: Request, bytes_max: int | None = None) -> bytes:
        """Receive and unpack a body.

        Raises:
            Rejection: the body is too large, has an unknown encoding, or did not arrive before `close`.
        """
        bytes_max = bytes_max or _BODY_BYTES_MAX
        try:
            async with asyncio.timeout(self._wait_s) as timeout:
                self._timeouts.add(timeout)
                try:
                    body = await read_body(request, bytes_max=bytes_max)
                finally:
                    self._timeouts.discard(timeout)
        except TimeoutError:
            raise Rejection(503, "the engine was stopped") from None
        encoding = request.headers.get("content-encoding", "identity")
        if encoding == "zstd":
            return await asyncio.to_thread(unpack_body, body, bytes_max=bytes_max)
        if encoding != "identity":
            raise Rejection(415, f"Content-Encoding {encoding!r} is not supported; use zstd or none")
        return bytes(body)

    async def parse[M: BaseModel](self, request: Request, model: type[M]) -> M:
        """Read a JSON body as `model`; raises as `read` and `parse_body`."""
        return parse_body(await self.read(request, JSON_BYTES_MAX), model, status=INVALID)

    def close(self) -> None:
        """Stop reading all bodies, so that the server does not wait for stalled clients."""
        self._wait_s = 0.0
        for timeout in self._timeouts:
            timeout.reschedule(asyncio.get_running_loop().time())


async def read_body(request: Request, *, bytes_max: int) -> bytearray:
    """Receive a body in chunks; `Rejection` if it is larger than `bytes_max`."""
    body, size_bytes = bytearray(), 0
    async for chunk in request.stream():
        size_bytes += len(chunk)
        body += chunk[: bytes_max - len(body)]
        if size_bytes > _DISCARDED_BYTES_MAX:
            break
    if size_bytes > bytes_max:
        raise _size_error(body, bytes_max)
    return body


def unpack_body(body: bytearray, *, bytes_max: int) -> bytes:
    """Unpack a zstd body; `Rejection` if it is not exactly one frame, or larger than `bytes_max` unpacked."""
    # Small steps, because each may unpack to many times its size.
    reader = zstandard.ZstdDecompressor(max_window_size=bytes_max).decompressobj()
    plain = bytearray()
    try:
        for start in range(0, len(body), _ZSTD_STEP_BYTES):
            plain += reader.decompress(body[start : start + _ZSTD_STEP_BYTES])
            if len(plain) > bytes_max:
                raise _size_error(plain, bytes_max)
    except zstandard.ZstdError as error:
        raise Rejection(400, f"the body is not valid zstd, its Content-Encoding: {error}") from error
    if not reader.eof or reader.unused_data:
        raise Rejection(400, "the body is not one whole zstd frame")
    return bytes(plain)


def json_position(body: bytes) -> tuple[str, int] | None:
    """Return the model and `seq_id` of a JSON body with other invalid fields; None if they are also invalid."""
    try:
        position = _RequestPosition.model_validate_json(body)
    except ValidationError:
        return None
    return position.model_id, position.seq_id


def _size_error(body: bytearray, bytes_max: int) -> Rejection:
    return Rejection(413, f"the body is larger than {bytes_max} bytes", body=bytes(body))
