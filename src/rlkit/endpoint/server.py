"""The HTTP server of endpoints: one for all rollouts of an event loop, while any of them has an endpoint.

Invariant: a request reaches the rollout of its key and no other. No request ends the server.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import socket
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import override
from weakref import WeakKeyDictionary

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlkit.endpoint import openai_chat
from rlkit.endpoint.openai_errors import Rejection, make_error_response
from rlkit.endpoint.session import Session

BODY_BYTES = 64 << 20
"""Limit of a request's body."""

BODY_S = 60.0
"""Limit for the arrival of a request's body."""

_GRACE_S = 1
_POLL_S = 0.001
_KEY_BYTES = 24

_servers = WeakKeyDictionary[asyncio.AbstractEventLoop, "EndpointServer"]()


class EndpointServer:
    """A server on a free port of the loopback interface; `use_server` starts and stops it."""

    def __init__(self) -> None:
        self.users = 0
        """Number of open `use_server` blocks."""
        self._sessions = dict[str, Session]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Connections inherit it. Without it, each reply's body waits 40 ms until its headers are acknowledged.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        """Base address of all endpoints."""
        routes = [
            Route("/v1/chat/completions", self._complete_chat, methods=["POST"]),
            Route("/v1/models", self._list_models, methods=["GET"]),
        ]
        self._server = _QuietServer(
            uvicorn.Config(
                Starlette(routes=routes, exception_handlers={Rejection: make_error_response}),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        # An empty context: the time of connections must not count as that of the rollout that came first.
        self._serving = asyncio.create_task(self._server.serve([self._listener]), context=contextvars.Context())

    async def wait_until_started(self) -> None:
        """Wait until the server answers."""
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110  uvicorn offers no event
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """End all connections and the server."""
        self._server.should_exit = True
        await self._serving

    @contextmanager
    def open_session(self, session: Session) -> Generator[str]:
        """Serve a session, and yield its key; the key is dead after the block."""
        key = f"rlkit-{secrets.token_urlsafe(_KEY_BYTES)}"
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]

    def _find_session(self, headers: Mapping[str, str]) -> Session:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise Rejection(401, "the API key belongs to no running rollout", code="invalid_api_key")
        return session

    async def _complete_chat(self, request: Request) -> Response:
        session = self._find_session(request.headers)
        return await openai_chat.respond(session, await _read_body(request), request)

    async def _list_models(self, request: Request) -> Response:
        self._find_session(request.headers)
        model = {"id": openai_chat.MODEL, "object": "model", "created": 0, "owned_by": "rlkit"}
        return JSONResponse({"object": "list", "data": [model]})


@asynccontextmanager
async def use_server() -> AsyncGenerator[EndpointServer]:
    """Yield the server of the running event loop; start it if it is the first use, and stop it after the last."""
    loop = asyncio.get_running_loop()
    server = _servers.get(loop)
    if server is None:
        server = _servers[loop] = EndpointServer()
    server.users += 1
    try:
        await server.wait_until_started()
        yield server
    finally:
        server.users -= 1
        if not server.users:
            _servers.pop(loop, None)
            await server.close()


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES:
                    raise Rejection(413, f"the body is larger than {BODY_BYTES} bytes")
    except TimeoutError:
        raise Rejection(408, f"the body did not arrive within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise Rejection(400, "the client is gone") from None
    return bytes(body)


class _QuietServer(uvicorn.Server):
    """A server that leaves signals to the run."""

    @override
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
