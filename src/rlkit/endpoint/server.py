"""The HTTP server of endpoints: one for all rollouts of an event loop, while any of them has an endpoint.

Invariant: a request reaches the rollout of its key and no other. No request ends the server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
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

_servers = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, "EndpointServer"]]()  # servers by interface


class EndpointServer(HttpServer):
    """A server on a free port of an interface; `serve_session` starts and stops it."""

    def __init__(self, interface: str) -> None:
        app = Starlette(
            routes=make_routes(self._find_session, lambda: [MODEL]),
            exception_handlers={404: _reject_path, 405: _reject_path},
        )
        super().__init__(app, address=(interface, 0), grace_s=_GRACE_S)
        self.sessions = dict[str, Session]()  # sessions by key

    async def close(self) -> None:
        """End all connections and the server."""
        self.should_exit = True
        try:
            await (await self.start())
        finally:
            self._listener.close()  # the wait may be cancelled

    def _find_session(self, key: str) -> Session:
        session = self.sessions.get(key)
        if session is None:
            raise Rejection(401, "the API key belongs to no running rollout", code="invalid_api_key")
        return session


async def _reject_path(request: Request, _: Exception) -> Response:
    if "upgrade" in request.headers:  # Codex goes on without WebSockets at once only after this status
        return encode_rejection(Rejection(426, "WebSockets are not served"))
    reason = f"{request.method} {request.url.path} is not served"
    return encode_rejection(Rejection(404, reason, code="not_found"))


@asynccontextmanager
async def serve_session(session: Session, interface: str) -> AsyncGenerator[tuple[int, str]]:
    """Serve a session on an interface until the end of the block, where its requests are cancelled and its key dies.

    Yields the port and the key. The first session of an event loop starts the interface's server; the last stops it.
    """
    servers = _servers.setdefault(asyncio.get_running_loop(), {})
    if interface not in servers:
        servers[interface] = EndpointServer(interface)
    server, key = servers[interface], f"rlkit-{secrets.token_urlsafe(_KEY_BYTES)}"
    server.sessions[key] = session
    try:
        await server.start()
        yield server.port, key
    finally:
        del server.sessions[key]
        try:
            await session.close()
        finally:
            if not server.sessions and servers.get(interface) is server:
                del servers[interface]
                await server.close()
