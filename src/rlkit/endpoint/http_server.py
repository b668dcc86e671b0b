"""HTTP servers of web applications, with limits on the headers of requests.

Invariant: a connection holds at most `HEADER_BYTES_MAX` unparsed bytes, however they are split into packets, and for at
most `HEADER_S` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import socket
from collections.abc import Generator
from typing import override

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_BYTES_MAX = 64 << 10
"""Maximum size of a request's headers. The SDK sends 1 KiB; proxies add a few more, including a signed token."""

HEADER_COUNT_MAX = 128
HEADER_S = 30.0
"""Time limit for all headers of a request, enough for a slow connection; the SDK sends them in one packet."""

_LINGER_S = 1.0
"""Delay before a rejected connection is closed: a client that is still sending would otherwise not read the reason."""


_POLL_S = 0.001


class HttpServer(uvicorn.Server):
    """A server that leaves signals to the run; it listens at once, and serves after `start`.

    Args:
        address: host and port; 0 for any free port.
        grace_s: time that running requests have to end when the server stops.
    """

    def __init__(self, app: ASGIApp, *, address: tuple[str, int], grace_s: int) -> None:
        config = uvicorn.Config(
            app,
            http=LimitedHttpProtocol,
            log_config=None,
            log_level="error",  # it warns of each WebSocket
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=grace_s + 1,  # for applications that ignore that their client is gone
            backlog=1,  # asyncio's accepts in a row: without a free descriptor it reports each of them, every second
        )
        super().__init__(config)
        self._grace_s = grace_s
        self._serving: asyncio.Task[None] | None = None
        self._listener = socket.create_server(address)
        # Connections inherit this option. Without it, each reply's body waits 40 ms until its headers are acknowledged:
        # asyncio itself sets it only if the listening socket was made with an explicit protocol.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host, self.port = self._listener.getsockname()[:2]

    async def start(self) -> asyncio.Task[None]:
        """Return the task that serves until `should_exit` is set, as soon as it answers or has failed."""
        if self._serving is None:
            # An empty context: the time of connections must not count as that of the rollout that came first.
            self._serving = asyncio.create_task(self.serve([self._listener]), context=contextvars.Context())
        while not self.started and not self._serving.done():  # noqa: ASYNC110  uvicorn offers no event
            await asyncio.sleep(_POLL_S)
        return self._serving

    @override
    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run([self._listener])

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listener.listen(socket.SOMAXCONN)  # connections that wait, which asyncio limits by the same number

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # As if the clients had left: uvicorn would cancel the requests, and report each with a traceback.
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._abort_connections)
        await super().shutdown(sockets)
        timer.cancel()

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class LimitedHttpProtocol(HttpToolsProtocol):
    """HTTP protocol that rejects requests with too long, too many or too slow headers.

    The limit counts the bytes that the parser has received without completing an element. It therefore also covers
    endless header lists, trailers and chunk extensions.
    """

    _pending_bytes = 0
    _header_count = 0
    _is_rejected = False
    _header_timer: asyncio.TimerHandle | None = None

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
        while data and not self._is_rejected and not self.transport.is_closing():
            # Split the data at the limit, because one packet could exceed it.
            part, data = data[: HEADER_BYTES_MAX - self._pending_bytes], data[HEADER_BYTES_MAX - self._pending_bytes :]
            self._pending_bytes += len(part)
            super().data_received(part)
            if self._pending_bytes >= HEADER_BYTES_MAX:
                self._reject(431, f"the headers are longer than {HEADER_BYTES_MAX} bytes")
            elif self._pending_bytes:
                self._start_header_timer()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        if self._header_count <= HEADER_COUNT_MAX:
            super().on_header(name, value)
        else:
            self._reject(431, f"there are more than {HEADER_COUNT_MAX} headers")

    @override
    def on_headers_complete(self) -> None:
        self._reset_pending()
        if not self._is_rejected:
            super().on_headers_complete()

    @override
    def on_body(self, body: bytes) -> None:
        self._reset_pending()
        if not self._is_rejected:
            super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._reset_pending()
        self._header_count = 0
        if not self._is_rejected:
            super().on_message_complete()

    def _reset_pending(self) -> None:
        self._pending_bytes = 0
        self._cancel_header_timer()

    def _start_header_timer(self) -> None:
        if self._header_timer is None and not self._is_rejected:
            self._header_timer = self.loop.call_later(
                HEADER_S, lambda: self._reject(408, f"the headers took longer than {HEADER_S:g} s")
            )

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _reject(self, status: int, reason: str) -> None:
        """Send an error and close; only close if another response is pending or no request has begun."""
        if self._is_rejected or self.transport.is_closing():
            return
        self._is_rejected = True
        self._cancel_header_timer()
        if not self._pending_bytes or (self.cycle and not self.cycle.response_complete):
            self.transport.abort()
            return
        phrase = {408: "Request Timeout", 431: "Request Header Fields Too Large"}[status]
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        self.transport.write(f"{head}content-length: {len(reason)}\r\nconnection: close\r\n\r\n{reason}".encode())
        self.loop.call_later(_LINGER_S, self.transport.close)
