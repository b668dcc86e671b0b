"""The embedded engine as a server: the Tinker REST protocol on loopback.

Invariant: no request, however malformed or long, ends the server, and `stop` ends all threads.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from starlette.routing import BaseRoute

from rlkit._util.activity import Activity
from rlkit._util.paths import engine_dir
from rlkit.endpoint.http_server import HttpServer
from rlkit.engine.model.model_files import resolve_model
from rlkit.engine.server.http_requests import BodyReader
from rlkit.engine.server.routes import make_app
from rlkit.engine.server.service import Service
from rlkit.errors import UsageError

_THREADS_MAX = 1024
_START_S = 300.0  # only to detect hangs: a start is slow on a busy machine
_GRACE_S = 5


class Extension(Protocol):
    """Further routes of an engine."""

    def routes(self) -> Sequence[BaseRoute]:
        """Return the routes, which check the key themselves."""
        ...

    async def close(self) -> None:
        """Release what the routes use, before the server stops."""
        ...


def make_api_key() -> str:
    """Return a new key in the form that the SDK requires."""
    return f"tml-{secrets.token_urlsafe(24)}"


def load_api_key(path: Path) -> str:
    """Return the key in a file; if there is none, write a new key to it, which only its owner can read.

    Raises:
        UsageError: the file is empty, or cannot be read or written.
    """
    try:
        with suppress(FileExistsError), open(path, "x", opener=partial(os.open, mode=0o600)) as file:
            file.write(make_api_key())
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot hold the API key: {getattr(error, 'strerror', None) or error}") from error
    if not key:
        raise UsageError(f"{path}: holds no API key; write one into it, or remove it for a new one")
    return key


class EngineServer:
    """A Tinker-compatible server in this process.

    Use it as a context manager::

        with EngineServer() as server:
            client = tinker.ServiceClient(base_url=server.url, api_key=server.api_key)

    HTTP runs on one daemon thread, torch on another.

    Args:
        port: port to listen on; 0 for any free port.
        api_key: key that clients must send, by default random. It must start with `tml-`, which the SDK requires.
        threads: number of cores that torch uses; by default one for a tiny model and all of them for others.
        device: "cpu" or "cuda"; by default the GPU if torch finds one.
        root: directory of checkpoints, which servers can share; by default `rlkit._util.paths.engine_dir()`.
        resolve: function from a model's name to its directory; by default `model_files.resolve_model`.
        models: names of models to advertise; other models can also be used.
        extension: makes further routes, such as `rlkit.serving.ChatModels`.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        threads: int | None = None,
        device: str | None = None,
        root: Path | None = None,
        resolve: Callable[[str], Path] | None = None,
        models: Sequence[str] = (),
        activity: Activity | None = None,
        extension: Callable[[EngineServer], Extension] | None = None,
    ) -> None:
        self.api_key = make_api_key() if api_key is None else api_key
        if not self.api_key.startswith("tml-"):
            raise UsageError("api_key must start with 'tml-': the Tinker SDK accepts no other key")
        if not 0 <= port <= 65_535:
            raise UsageError(f"port must be 0 … 65535, not {port}")
        if threads is not None and not 1 <= threads <= _THREADS_MAX:
            raise UsageError(f"threads must be between 1 and {_THREADS_MAX}, not {threads}")
        if not host:
            raise UsageError("host is empty, which means all addresses: use 127.0.0.1, or 0.0.0.0 for all addresses")
        self._address = (host, port)
        self._root = (root or engine_dir()).absolute()  # the working directory may change
        self._service = Service(
            resolve=resolve or resolve_model,
            root=self._root,
            threads=threads,
            device=device,
            activity=activity,
        )
        self._bodies = BodyReader()
        self.models = models
        """Names of the advertised models."""
        self._extension = None if extension is None else extension(self)
        self._app = make_app(self._service, self._bodies, api_key=self.api_key, models=models)
        if self._extension is not None:
            self._app.router.routes.extend(self._extension.routes())
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._server: HttpServer | None = None

    @property
    def url(self) -> str:
        """Base URL for clients; available after `start`."""
        if self._server is None:
            raise UsageError("the engine has no URL before start()")
        return f"http://{self._server.host}:{self._server.port}"

    def start(self) -> Self:
        """Start the server, and return when it answers requests.

        Raises:
            UsageError: the server cannot listen on the address, or was already started.
        """
        if self._thread is not None:
            raise UsageError("this engine was already started: create a new EngineServer")
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{self._root}: cannot store checkpoints here ({error.strerror}); choose another root"
            ) from error
        try:
            server = self._server = HttpServer(self._app, address=self._address, grace_s=_GRACE_S)
        except OSError as error:
            address = f"{self._address[0]}:{self._address[1]}"
            raise UsageError(
                f"cannot listen on {address} ({error.strerror}): choose another port, 0 for any, or another host"
            ) from error
        target = partial(asyncio.run, self._serve(server))
        self._thread = threading.Thread(target=target, name="rlkit-engine-http", daemon=True)
        self._service.start()
        self._thread.start()
        if not self._ready.wait(_START_S):
            raise RuntimeError(f"the engine's HTTP server did not start within {_START_S} s")
        return self

    def stop(self) -> None:
        """Fail pending requests and end both threads; keep the checkpoints. May be called more than once.

        Running training ends after its micro-batch; a running save is completed.
        """
        if self._thread is None or self._server is None:
            return
        if self._loop is not None and self._extension is not None and self._thread.is_alive():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._extension.close(), self._loop).result(_GRACE_S)
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._halt)
        self._server.should_exit = True
        self._thread.join()
        self._service.stop()

    async def _serve(self, server: HttpServer) -> None:
        self._loop = asyncio.get_running_loop()
        serving = await server.start()
        self._ready.set()
        watching = asyncio.create_task(self._service.watch_sessions())
        await serving
        watching.cancel()

    def _halt(self) -> None:
        self._service.halt()
        self._bodies.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
