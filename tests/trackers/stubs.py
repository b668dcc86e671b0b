"""Stubs of tracking services."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


@dataclass
class DocentStub:
    """Stub of the Docent server that records its requests."""

    url: str = ""
    refuse: bool = False
    collections: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def answer(self, request: Request) -> Response:
        """Answer like the Docent server."""
        self.headers.append(request.headers.get("authorization", ""))
        if self.refuse and request.method == "POST":
            return JSONResponse({"detail": "no"}, 400)
        body, path = await request.body(), request.url.path
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.bodies.append(body)
        if path.endswith("/create"):
            self.collections.append(json.loads(body))
            return JSONResponse({"collection_id": f"c{len(self.collections)}"})
        if path.endswith("/agent_runs"):
            assert "/c1/" in path
            self.runs += json.loads(body)["agent_runs"]
        return JSONResponse({})


@contextmanager
def listening(app: Starlette) -> Generator[str]:
    """Run a server on this machine and yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@contextmanager
def docent_stub() -> Generator[DocentStub]:
    """Run a stub of the Docent server."""
    server = DocentStub()
    with listening(Starlette(routes=[Route("/{path:path}", server.answer, methods=["GET", "POST"])])) as server.url:
        yield server


@contextmanager
def silent_server() -> Generator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
