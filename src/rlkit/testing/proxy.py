"""A proxy that loses things: what stands between a real client and a real service on a bad day.

Invariant: what it lets through is unchanged; what it spoils, and how, follows from its seed and the order of requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Literal, Self

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

type Spoiled = Literal["401", "402", "429", "500", "503", "408", "reply", "cut", "hang"]
"""An HTTP status instead of an answer; or the request is carried out, and its `reply` is lost, or `cut` short with the
connection; or it is left to `hang` until whoever asked gives up."""

_METHODS = ["GET", "POST", "PUT", "DELETE"]
_HOP_BY_HOP = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}
_TIMEOUT_S = 120.0
_POLL_S = 0.005
_GRACE_S = 5


class FaultyProxy:
    """Forwards HTTP to a service, and spoils a share of the requests.

    ::

        with EngineServer() as engine, FaultyProxy(engine.url, share=0.2) as proxy:
            client = tinker.ServiceClient(base_url=proxy.url, api_key=engine.api_key)

    Args:
        share: of the requests that are spoiled.
        kinds: how, each as likely as the others.
        only: what the paths of requests end with that may be spoiled; any by default.
    """

    def __init__(
        self,
        target: str,
        *,
        share: float,
        kinds: Sequence[Spoiled] = ("429", "500", "503", "408", "reply"),
        seed: int = 0,
        only: str = "",
    ) -> None:
        self.seen: Counter[str] = Counter()
        """Requests by what became of them: `through`, or how they were spoiled."""
        self._target = target.rstrip("/")
        self.share = share
        """Of the requests that are spoiled from now on."""
        self._kinds = tuple(kinds)
        self._random = Random(seed)
        self._only = only
        app = Starlette(routes=[Route("/{path:path}", self._forward, methods=_METHODS)])
        config = uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = uvicorn.Server(config)
        self._client = httpx.AsyncClient(timeout=_TIMEOUT_S)
        self._thread = threading.Thread(target=self._run, name="rlkit-faulty-proxy", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            self._thread.join(_POLL_S)
            if not self._thread.is_alive():
                raise RuntimeError("the proxy did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        async def serve() -> None:
            async with self._client:
                await self._server.serve()

        asyncio.run(serve())

    async def _forward(self, request: Request) -> Response:
        at_risk = request.url.path.endswith(self._only)
        spoiled = self._random.choice(self._kinds) if at_risk and self._random.random() < self.share else None
        self.seen[spoiled or "through"] += 1
        if spoiled is not None and spoiled not in ("reply", "cut"):
            return await _instead(spoiled, request)
        headers = [(name, value) for name, value in request.headers.raw if name.decode() not in _HOP_BY_HOP]
        sent = self._client.build_request(
            request.method,
            f"{self._target}{request.url.path}",
            params=request.query_params,
            headers=headers,
            content=await request.body(),
        )
        if "content-encoding" in request.headers:
            sent.headers["content-encoding"] = request.headers["content-encoding"]
        answer = await self._client.send(sent)
        if spoiled == "reply":
            return JSONResponse({"detail": "the reply was lost"}, 502)
        kept = {name: value for name, value in answer.headers.items() if name not in _HOP_BY_HOP}
        if spoiled == "cut":
            return _cut(answer, kept)
        return Response(answer.content, answer.status_code, kept)


async def _instead(spoiled: Spoiled, request: Request) -> Response:
    if spoiled != "hang":
        return JSONResponse({"detail": "spoiled"}, int(spoiled))
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return Response()


def _cut(answer: httpx.Response, headers: dict[str, str]) -> Response:
    """Half of what was promised, after which the connection is closed."""

    async def half() -> AsyncIterator[bytes]:
        yield answer.content[: len(answer.content) // 2]
        raise ConnectionAbortedError

    return StreamingResponse(half(), answer.status_code, {**headers, "content-length": str(len(answer.content) + 1)})
