"""The local web server of the pages: GET requests on loopback, answered from files.

Invariant: data is given only to a request with the token of the link, for a name of this machine. The pages may load
nothing from elsewhere and run only the scripts of this package. A run is never locked or written to.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import html
import json
import re
import secrets
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlkit.endpoint.http_server import HttpServer
from rlkit.errors import RlkitError, UsageError
from rlkit.view.library import Library

STATIC = Path(__file__).parent / "static"

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# An environment's own picture has no origin, and no network but WebRTC, which browsers have no policy for.
_FRAME_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; frame-ancestors 'self'"
)
_GRACE_S = 5  # time that running requests have to end when the server stops


@cache
def content_security_policy(frame_ancestors: str) -> str:
    """Return the policy of the page: its own scripts, the hashes of scripts in its HTML, and nothing from elsewhere."""
    inline = re.findall(r"<script[^>]*>(.+?)</script>", (STATIC / "index.html").read_text(), re.DOTALL)
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in inline]
    return (
        f"default-src 'none'; script-src 'self' {' '.join(hashes)}; style-src 'self'; img-src 'self' data: blob:; "
        f"connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors {frame_ancestors}"
    )


def make_app(library: Library, token: str, *, frame_ancestors: str = "'none'") -> Starlette:
    """Return the application, which gives data for the token; `frame_ancestors` may show its pages in a frame."""

    async def give_data(request: Request) -> Response:
        sent_token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent_token.encode(), token.encode()):
            return JSONResponse({"error": "open the link that `rlkit view` printed: its token is missing"}, 401)
        path = request.scope["raw_path"].decode("ascii", "replace").partition("/api/")[2].partition("?")[0]
        try:
            data = await asyncio.to_thread(library.respond, path, dict(request.query_params))
        except (RlkitError, OSError) as error:
            content = json.dumps({"error": str(error)})  # in ASCII, because a path may be no UTF-8
            status = 404 if isinstance(error, UsageError) else 500
            return Response(content, status, media_type="application/json")
        headers = {"ETag": f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type="application/json")

    data, static = Route("/api/{path:path}", give_data), StaticFiles(directory=STATIC, html=True)
    return Starlette(routes=[data, Mount("/", static)], middleware=[
        Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),  # no page of another site
        Middleware(_guard_app, frame_ancestors=frame_ancestors),
    ])  # fmt: skip


def _guard_app(app: ASGIApp, frame_ancestors: str) -> ASGIApp:
    """Return the application with the headers of each answer, and without answers to other methods than GET."""
    # Starlette's own base class of such a wrapper raises an error if the browser leaves before the answer.
    frame_policy = _FRAME_POLICY + ("" if "none" in frame_ancestors else f" {frame_ancestors}")

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        policy = frame_policy if scope["path"] == "/frame.html" else content_security_policy(frame_ancestors)

        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update({"Content-Security-Policy": policy, **_HEADERS})
            await send(message)

        is_get = scope["method"] == "GET"  # starlette answers HEAD, too
        refusal = PlainTextResponse("Method Not Allowed", 405, {"Allow": "GET"})
        await (app if is_get else refusal)(scope, receive, send_headers)

    return respond


class ViewServer(HttpServer):
    """A server of the pages on a port of loopback; 0 is a free one. `run` answers requests until `stop`.

    Raises:
        UsageError: the port is in use.
    """

    def __init__(self, library: Library, *, port: int = 0, frame_ancestors: str = "'none'") -> None:
        self.token = secrets.token_urlsafe(16)
        app = make_app(library, self.token, frame_ancestors=frame_ancestors)
        try:  # it listens now, so that a browser that is faster than the server waits
            super().__init__(app, address=("127.0.0.1", port), grace_s=_GRACE_S)
        except OSError as error:
            raise UsageError(f"--port: port {port} of 127.0.0.1 cannot be used: {error.strerror}") from error

    @property
    def link(self) -> str:
        """Address of the list of runs, with the token."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def stop(self) -> None:
        """End `run`; may be called from any thread."""
        self.should_exit = True


@dataclass(frozen=True)
class RunView:
    """The page of a run; a notebook shows it in a frame."""

    link: str

    def __str__(self) -> str:
        return self.link

    def _repr_html_(self) -> str:
        link = html.escape(self.link)
        frame = f'<iframe src="{link}" width="100%" height="720" style="border: 1px solid #8884"></iframe>'
        return f'<p><a href="{link}" target="_blank">{link}</a></p>{frame}'


@cache
def view_run(directory: Path) -> RunView:
    """Serve the page of a run in the background of this process, and return its view."""
    library = Library([directory])
    server = ViewServer(library, frame_ancestors="http://localhost:* http://127.0.0.1:*")
    threading.Thread(target=server.run, name="rlkit_view", daemon=True).start()
    return RunView(server.link + library.start)
