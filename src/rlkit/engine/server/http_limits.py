"""HTTP of the server, with limits on what a client may send before its key is read.

Invariant: a connection holds at most `HEADER_BYTES_MAX` bytes that are not yet a request or a part of a body, however
they are cut into packets, and holds them for at most `HEADER_S` seconds.
"""

from __future__ import annotations

import asyncio
from typing import Any, override

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

HEADER_BYTES_MAX = 64 << 10
"""The SDK sends 1 KiB; what proxies add, a signed token among it, is a few more."""

HEADER_COUNT_MAX = 128
HEADER_S = 30.0
"""Limit for all headers of a request, also for a client on a bad line; the SDK sends them in one packet."""

_LINGER_S = 1.0
"""A client that still sends would find the connection reset, and never read why."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """Refuses requests whose headers are too long, too many or too slow.

    What counts is what the parser was fed without anything coming of it, so that an endless header, endless headers,
    endless trailers and the endless extension of a chunk are all one case.
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
        self._too_late: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  as uvicorn narrows it
        super().connection_made(transport)
        self._wait()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        while data and not self._refused and not self.transport.is_closing():
            # No more at a time than the limit leaves, or one packet could pass it.
            part, data = data[: HEADER_BYTES_MAX - self._pending_bytes], data[HEADER_BYTES_MAX - self._pending_bytes :]
            self._pending_bytes += len(part)
            super().data_received(part)
            if self._pending_bytes >= HEADER_BYTES_MAX:
                self._refuse(431, f"the headers are longer than {HEADER_BYTES_MAX} bytes")
            elif self._pending_bytes:
                self._wait()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        if self._header_count <= HEADER_COUNT_MAX:
            super().on_header(name, value)
        else:
            self._refuse(431, f"there are more than {HEADER_COUNT_MAX} headers")

    @override
    def on_headers_complete(self) -> None:
        self._advance()
        if not self._refused:
            super().on_headers_complete()

    @override
    def on_body(self, body: bytes) -> None:
        self._advance()
        if not self._refused:
            super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._advance()
        self._header_count = 0
        if not self._refused:
            super().on_message_complete()

    def _advance(self) -> None:
        self._pending_bytes = 0
        self._stop_waiting()

    def _wait(self) -> None:
        if self._too_late is None and not self._refused:
            self._too_late = self.loop.call_later(
                HEADER_S, lambda: self._refuse(408, f"the headers took longer than {HEADER_S:g} s")
            )

    def _stop_waiting(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def _refuse(self, status: int, reason: str) -> None:
        """Answer, unless another answer is awaited or nothing was asked, and close; the rest is thrown away."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_waiting()
        if not self._pending_bytes or (self.cycle and not self.cycle.response_complete):
            self.transport.abort()
            return
        phrase = {408: "Request Timeout", 431: "Request Header Fields Too Large"}[status]
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        self.transport.write(f"{head}content-length: {len(reason)}\r\nconnection: close\r\n\r\n{reason}".encode())
        self.loop.call_later(_LINGER_S, self.transport.close)
