"""HTTP requests as they come in: headers within limits, bodies read, unpacked and parsed within limits.

Invariant: before its key is read, a connection holds at most `HEADER_BYTES_MAX` bytes that are not yet a request or a
part of a body, however they are cut into packets, and for at most `HEADER_S` seconds. Of a body no more than a limit in
bytes is ever kept, packed or not, and a body that cannot be read raises `HttpError`.
"""

from __future__ import annotations

import asyncio
from typing import Any, override

import zstandard
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

HEADER_BYTES_MAX = 64 << 10
"""The SDK sends 1 KiB; proxies add a few more, a signed token among them."""

HEADER_COUNT_MAX = 128
HEADER_S = 30.0
"""Limit for all headers of a request, also for a client on a bad line; the SDK sends them in one packet."""

_LINGER_S = 1.0
"""A client that still sends would find the connection reset, and never read why."""

_BODY_BYTES_MAX = 64 << 20
# Nothing else is answered while JSON is parsed, which takes half a microsecond a number. A prompt of 131,072 tokens
# comes to a mebibyte at most.
JSON_BYTES_MAX = 2 << 20
# Bytes read and dropped of a body that is too large: clients send all of it before they read the reason, and would
# otherwise find the connection closed.
_DISCARDED_BYTES_MAX = 256 << 20
_ZSTD_STEP_BYTES = 256


class LimitedHttpProtocol(HttpToolsProtocol):
    """HTTP protocol that refuses requests whose headers are too long, too many or too slow.

    The limit counts the bytes that the parser got without completing anything, so that an endless header, endless
    headers, endless trailers and the endless extension of a chunk are all one case.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._pending_bytes = 0
        self._header_count = 0
        self._refused = False
        self._header_timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  as uvicorn narrows it
        super().connection_made(transport)
        self._start_header_timer()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        while data and not self._refused and not self.transport.is_closing():
            # No more at a time than the limit leaves, or one packet could exceed it.
            part, data = data[: HEADER_BYTES_MAX - self._pending_bytes], data[HEADER_BYTES_MAX - self._pending_bytes :]
            self._pending_bytes += len(part)
            super().data_received(part)
            if self._pending_bytes >= HEADER_BYTES_MAX:
                self._refuse(431, f"the headers are longer than {HEADER_BYTES_MAX} bytes")
            elif self._pending_bytes:
                self._start_header_timer()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        if self._header_count <= HEADER_COUNT_MAX:
            super().on_header(name, value)
        else:
            self._refuse(431, f"there are more than {HEADER_COUNT_MAX} headers")

    @override
    def on_headers_complete(self) -> None:
        self._reset_pending()
        if not self._refused:
            super().on_headers_complete()

    @override
    def on_body(self, body: bytes) -> None:
        self._reset_pending()
        if not self._refused:
            super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._reset_pending()
        self._header_count = 0
        if not self._refused:
            super().on_message_complete()

    def _reset_pending(self) -> None:
        self._pending_bytes = 0
        self._cancel_header_timer()

    def _start_header_timer(self) -> None:
        if self._header_timer is None and not self._refused:
            self._header_timer = self.loop.call_later(
                HEADER_S, lambda: self._refuse(408, f"the headers took longer than {HEADER_S:g} s")
            )

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, status: int, reason: str) -> None:
        """Respond and close, ignoring further data; only close while another response is due or no request began."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._cancel_header_timer()
        if not self._pending_bytes or (self.cycle and not self.cycle.response_complete):
            self.transport.abort()
            return
        phrase = {408: "Request Timeout", 431: "Request Header Fields Too Large"}[status]
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        self.transport.write(f"{head}content-length: {len(reason)}\r\nconnection: close\r\n\r\n{reason}".encode())
        self.loop.call_later(_LINGER_S, self.transport.close)


class HttpError(Exception):
    """An error with an HTTP status of its own; `body` is the part of the request's body that was read."""

    def __init__(self, status: int, message: str, body: bytes | bytearray = b"") -> None:
        super().__init__(message)
        self.status = status
        self.body = bytes(body)


class _RequestPosition(BaseModel):
    model_id: str
    seq_id: int


class BodyReader:
    """Reads the bodies of a server's requests. Used from the server's own thread only."""

    def __init__(self) -> None:
        self._timeouts: set[asyncio.Timeout] = set()
        self._wait_s: float | None = None

    async def read(self, request: Request, bytes_max: int | None = None) -> bytes:
        """Receive a body and unpack it.

        Raises:
            HttpError: the body is too large, has an unknown encoding, or did not arrive before `close`.
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
            raise HttpError(503, "the engine was stopped") from None
        encoding = request.headers.get("content-encoding", "identity")
        if encoding == "zstd":
            return await asyncio.to_thread(unpack_body, body, bytes_max=bytes_max)
        if encoding != "identity":
            raise HttpError(415, f"Content-Encoding {encoding!r} is not supported; use zstd or none")
        return bytes(body)

    async def parse[M: BaseModel](self, request: Request, model: type[M]) -> M:
        """Read a body in JSON as `model`; errors are those of `read` and `parse_body`."""
        return parse_body(await self.read(request, JSON_BYTES_MAX), model)

    def close(self) -> None:
        """Stop reading all bodies, so that the server does not wait for a client that has stopped sending."""
        self._wait_s = 0.0
        for timeout in self._timeouts:
            timeout.reschedule(asyncio.get_running_loop().time())


async def read_body(request: Request, *, bytes_max: int) -> bytearray:
    """Receive a body in chunks; `HttpError` if it is larger than `bytes_max`."""
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
    """Unpack a body in zstd; `HttpError` if it is not exactly one frame, or larger than `bytes_max` unpacked."""
    # Small steps, because each one may unpack to many times its size.
    reader = zstandard.ZstdDecompressor(max_window_size=bytes_max).decompressobj()
    plain = bytearray()
    try:
        for start in range(0, len(body), _ZSTD_STEP_BYTES):
            plain += reader.decompress(body[start : start + _ZSTD_STEP_BYTES])
            if len(plain) > bytes_max:
                raise _size_error(plain, bytes_max)
    except zstandard.ZstdError as error:
        raise HttpError(400, f"the body is not zstd as its Content-Encoding says: {error}") from error
    if not reader.eof or reader.unused_data:
        raise HttpError(400, "the body is not one whole zstd frame")
    return bytes(plain)


def parse_body[M: BaseModel](body: bytes, model: type[M]) -> M:
    """Parse a body in JSON as `model`; `HttpError` names the first invalid field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise HttpError(422, f"{field or 'body'}: {first['msg']}", body) from error


def json_position(body: bytes) -> tuple[str, int] | None:
    """Return the model and `seq_id` of a body in JSON whose other fields may be invalid; None if they are, too."""
    try:
        position = _RequestPosition.model_validate_json(body)
    except ValidationError:
        return None
    return position.model_id, position.seq_id


def _size_error(body: bytearray, bytes_max: int) -> HttpError:
    return HttpError(413, f"the body is larger than {bytes_max} bytes", body)
