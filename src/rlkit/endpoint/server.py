"""The HTTP server of endpoints: one for all rollouts of an event loop, while any of them has an endpoint.

Invariant: a request reaches the rollout of its key and no other. No request ends the server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from rlkit.endpoint.http_responses import encode_rejection, make_routes
from rlkit.endpoint.http_server import HttpServer
from rlkit.endpoint.protocol import MODEL
from rlkit.endpoint.rejection import Rejection
from rlkit.endpoint.session import Session

_GRACE_S = 1
_KEY_BYTES = 24

LOOPBACK, ALL_INTERFACES = "127.0.0.1", "0.0.0.0"

_servers = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, "EndpointServer"]]()
"""Servers by interface."""


class EndpointServer(HttpServer):
    """A server on a free port of an interface; `use_server` starts and stops it."""

    def __init__(self, interface: str) -> None:
        app = Starlette(
            routes=make_routes(self._find_session, lambda: [MODEL]),
            exception_handlers={404: _reject_path, 405: _reject_path},
        )
        super().__init__(app, address=(interface, 0), grace_s=_GRACE_S)
        self.users = 0
        """Number of open `use_server` blocks."""
        self._sessions = dict[str, Session]()

    async def close(self) -> None:
        """End all connections and the server."""
        self.should_exit = True
        try:
            await (await self.start())
        finally:
            self._listener.close()  # the wait may be cancelled

    @contextmanager
    def open_session(self, session: Session) -> Generator[str]:
        """Serve a session, and yield its key; the key is dead after the block."""
        key = f"rlkit-{secrets.token_urlsafe(_KEY_BYTES)}"
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]

    def _find_session(self, key: str) -> Session:
        session = self._sessions.get(key)
        if session is None:
            raise Rejection(401, "the API key belongs to no running rollout", code="invalid_api_key")
        return session


async def _reject_path(request: Request, _: Exception) -> Response:
    if "upgrade" in request.headers:  # Codex goes on without WebSockets at once only after this status
        return encode_rejection(Rejection(426, "WebSockets are not served"))
    reason = f"{request.method} {request.url.path} is not served"
    return encode_rejection(Rejection(404, reason, code="not_found"))


@asynccontextmanager
async def use_server(interface: str) -> AsyncGenerator[EndpointServer]:
    """Yield the event loop's server on an interface; start it if it is the first use, and stop it after the last."""
    servers = _servers.setdefault(asyncio.get_running_loop(), {})
    server = servers.get(interface)
    if server is None:
        server = servers[interface] = EndpointServer(interface)
    server.users += 1
    try:
        await server.start()
        yield server
    finally:
        server.users -= 1
        if not server.users:
            servers.pop(interface, None)
            await server.close()
