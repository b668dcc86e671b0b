"""Addresses of this machine for tests of connections: one that answers with a status, and one that refuses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def status_server(*statuses: int) -> Iterator[str]:
    """Serve HTTP with these statuses in turn, the last of them for ever; give `host:port`."""
    remaining = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(remaining.pop(0) if len(remaining) > 1 else remaining[0])
            self.send_header("x-request-id", "req-7")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def closed_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]
