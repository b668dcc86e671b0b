"""HTTP proxy with injected faults, between a real client and a real service.

Invariant: requests without a fault pass unchanged; the seed and the order of requests determine the faults.
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

type ProxyFault = Literal["401", "402", "429", "500", "503", "408", "reply", "cut", "hang"]
"""An HTTP status in place of a response; `reply`: the request runs, but its response is lost; `cut`: the response is
truncated; `hang`: no response until the client disconnects."""

_METHODS = ["GET", "POST", "PUT", "DELETE"]
_HOP_BY_HOP = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}
_TIMEOUT_S = 120.0
_POLL_S = 0.005
_GRACE_S = 5


class FaultyProxy:
    """Proxy that forwards HTTP to a service, with faults in a share of the requests.

    ::

        with EngineServer() as engine, FaultyProxy(engine.url, share=0.2) as proxy:
            client = tinker.ServiceClient(base_url=proxy.url, api_key=engine.api_key)

    Args:
        share: share of the requests with a fault.
        kinds: kinds of faults, with equal probability.
        path_suffix: suffix of the paths of requests that can have a fault; any path by default.
    """

    def __init__(
        self,
        target: str,
        *,
        share: float,
        kinds: Sequence[ProxyFault] = ("429", "500", "503", "408", "reply"),
        seed: int = 0,
        path_suffix: str = "",
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        """Number of requests by fault, or `through` without one."""
        self._target = target.rstrip("/")
        self.share = share
        """Share of the next requests with a fault."""
        self._kinds = tuple(kinds)
        self._random = Random(seed)
        self._path_suffix = path_suffix
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
        """URL of the proxy."""
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
        can_fail = request.url.path.endswith(self._path_suffix)
        fault = self._random.choice(self._kinds) if can_fail and self._random.random() < self.share else None
        self.outcomes[fault or "through"] += 1
        if fault is not None and fault not in ("reply", "cut"):
            return await _respond_with_fault(fault, request)
        headers = [(name, value) for name, value in request.headers.raw if name.decode() not in _HOP_BY_HOP]
        forwarded = self._client.build_request(
            request.method,
            f"{self._target}{request.url.path}",
            params=request.query_params,
            headers=headers,
            content=await request.body(),
        )
        if "content-encoding" in request.headers:
            forwarded.headers["content-encoding"] = request.headers["content-encoding"]
        response = await self._client.send(forwarded)
        if fault == "reply":
            return JSONResponse({"detail": "the reply was lost"}, 502)
        response_headers = {name: value for name, value in response.headers.items() if name not in _HOP_BY_HOP}
        if fault == "cut":
            return _cut_response(response, response_headers)
        return Response(response.content, response.status_code, response_headers)


async def _respond_with_fault(fault: ProxyFault, request: Request) -> Response:
    if fault != "hang":
        return JSONResponse({"detail": "injected fault"}, int(fault))
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return Response()


def _cut_response(response: httpx.Response, headers: dict[str, str]) -> Response:
    """Return half of a response, then close the connection."""

    async def stream_half() -> AsyncIterator[bytes]:
        yield response.content[: len(response.content) // 2]
        raise ConnectionAbortedError

    length = str(len(response.content) + 1)
    return StreamingResponse(stream_half(), response.status_code, {**headers, "content-length": length})
