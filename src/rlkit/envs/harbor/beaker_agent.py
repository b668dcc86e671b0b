"""HTTP server in a Beaker job that runs commands and transfers files.

Invariant: the server accepts only requests with its token, and stops after `IDLE_S` without requests. It is
started from its source text, and needs only Python 3.9 or later in the image.
"""

from __future__ import annotations

import hmac
import io
import json
import os
import pwd
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

TOKEN = os.environ.pop("RLKIT_AGENT_TOKEN", "")
IDLE_S = float(os.environ.pop("RLKIT_AGENT_IDLE_S", "300"))
READY = "rlkit agent on port"
OUTPUT_BYTES = 16 << 20
DRAIN_S = 0.5

last_request_s = time.monotonic()


def execute(request: dict[str, Any]) -> dict[str, Any]:
    """Run a command until it ends or its time limit is reached."""
    user, group = None, None
    env: dict[str, str] = {**os.environ, **request["env"]}
    if request["user"] is not None and os.getuid() == 0:
        name = str(request["user"])
        account = pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
        user, group = account.pw_uid, account.pw_gid
        env.update(HOME=account.pw_dir, USER=account.pw_name)
    if request["cwd"]:
        Path(request["cwd"]).mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        ["/bin/bash", "-c", request["command"]],
        cwd=request["cwd"] or None,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        user=user,
        group=group,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = OutputReader(process.stdout), OutputReader(process.stderr)
    late = False
    try:
        process.wait(request["timeout_s"])
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {"code": process.returncode, "late": late, "out": out.collect(), "err": err.collect()}


def pack(source: str, name: str) -> bytes:
    """Return an archive of a file or a folder, which has this name there."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        file.add(source, arcname=name)
    return archive.getvalue()


class OutputReader:
    """Reader of a command's output, which keeps the first `OUTPUT_BYTES` and drops the rest."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.data = bytearray()
        self.thread = threading.Thread(target=self.read, args=(stream,), daemon=True)
        self.thread.start()

    def read(self, stream: IO[bytes]) -> None:
        """Read the stream to its end."""
        while chunk := os.read(stream.fileno(), 65536):
            self.data += chunk[: max(OUTPUT_BYTES - len(self.data), 0)]

    def collect(self) -> str:
        """Return the output; wait up to `DRAIN_S` for its end, because other processes may keep the stream open."""
        self.thread.join(DRAIN_S)
        return self.data.decode(errors="replace")


class Handler(BaseHTTPRequestHandler):
    """Handler of requests: the method is always POST, and the path is the action."""

    def do_POST(self) -> None:
        """Handle a request."""
        global last_request_s  # noqa: PLW0603  the program consists of this file
        last_request_s = time.monotonic()
        size = int(self.headers.get("Content-Length", "0"))
        body = self.rfile.read(size)
        authorization = self.headers.get("Authorization", "")
        if not TOKEN or not hmac.compare_digest(authorization, "Bearer " + TOKEN):
            self.answer(403, b"")
            return
        actions: dict[str, Callable[[bytes], bytes]] = {"/run": self.run, "/put": self.put, "/get": self.get}
        actions["/alive"] = lambda body: b""
        try:
            status, content = 200, actions[self.path](body)
        except Exception as error:  # reported to the client
            status, content = 500, f"{type(error).__name__}: {error}".encode()
        last_request_s = time.monotonic()
        self.answer(status, content)

    def run(self, body: bytes) -> bytes:
        """Run a command."""
        return json.dumps(execute(json.loads(body))).encode()

    def put(self, body: bytes) -> bytes:
        """Unpack an archive into a folder."""
        target = self.headers["X-Path"]
        Path(target).mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            archive.extractall(target)
        return b""

    def get(self, body: bytes) -> bytes:
        """Pack a file or a folder into an archive."""
        return pack(self.headers["X-Path"], self.headers["X-Name"])

    def answer(self, status: int, content: bytes) -> None:
        """Send a response."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because commands may contain secrets."""


def watch(server: ThreadingHTTPServer) -> None:
    """Stop the server after `IDLE_S` without requests."""
    while time.monotonic() - last_request_s < IDLE_S:
        time.sleep(min(1.0, IDLE_S / 4))
    server.shutdown()


def main() -> None:
    """Serve until idle."""
    server = ThreadingHTTPServer(("0.0.0.0", int(os.environ.pop("RLKIT_AGENT_PORT", "0"))), Handler)
    threading.Thread(target=watch, args=(server,), daemon=True).start()
    print(READY, server.server_address[1], flush=True)
    server.serve_forever()
    sys.exit(0)


if __name__ == "__main__":
    main()
