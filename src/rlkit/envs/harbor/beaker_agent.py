"""What runs as a job of Beaker and does what it is asked: commands, and files in and out.

Invariant: it answers only who knows its token, and ends by itself when nobody has asked for a while. It is started from
its text, by a Python of 3.9 or later in the image, and needs nothing but that.
"""

from __future__ import annotations

import base64
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
LAST_S = 0.5

asked_s = time.monotonic()


def execute(asked: dict[str, Any]) -> dict[str, Any]:
    """Run a command to its end, or to its time limit."""
    user, group = None, None
    env: dict[str, str] = {**os.environ, **asked["env"]}
    if asked["user"] is not None and os.getuid() == 0:
        named = str(asked["user"])
        found = pwd.getpwuid(int(named)) if named.isdigit() else pwd.getpwnam(named)
        user, group = found.pw_uid, found.pw_gid
        env.update(HOME=found.pw_dir, USER=found.pw_name)
    if asked["cwd"]:
        Path(asked["cwd"]).mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        ["/bin/bash", "-c", asked["command"]],
        cwd=asked["cwd"] or None,
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
    out, err = Kept(process.stdout), Kept(process.stderr)
    late = False
    try:
        process.wait(asked["timeout_s"])
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {
        "code": process.returncode,
        "late": late,
        "out": base64.b64encode(out.so_far()).decode(),
        "err": base64.b64encode(err.so_far()).decode(),
    }


class Kept:
    """The beginning of what a command prints; the rest is read and dropped, also after the command's end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.data = bytearray()
        self.thread = threading.Thread(target=self.read, args=(stream,), daemon=True)
        self.thread.start()

    def read(self, stream: IO[bytes]) -> None:
        """Read it to its end."""
        while chunk := os.read(stream.fileno(), 65536):
            self.data += chunk[: max(OUTPUT_BYTES - len(self.data), 0)]

    def so_far(self) -> bytes:
        """What there is a moment after the command's end."""
        self.thread.join(LAST_S)
        return bytes(self.data)


class Handler(BaseHTTPRequestHandler):
    """Answers requests."""

    def do_POST(self) -> None:
        """All of them are POST, and their path says what is wanted."""
        global asked_s  # noqa: PLW0603  this is the whole program
        asked_s = time.monotonic()
        size = int(self.headers.get("Content-Length", "0"))
        body = self.rfile.read(size)
        given = self.headers.get("Authorization", "")
        if not TOKEN or not hmac.compare_digest(given, "Bearer " + TOKEN):
            self.answer(403, b"")
            return
        wanted: dict[str, Callable[[bytes], bytes]] = {"/run": self.run, "/put": self.put, "/get": self.get}
        wanted |= {"/alive": lambda body: b"", "/end": self.end}
        try:
            status, content = 200, wanted[self.path](body)
        except Exception as error:  # told to whoever asked
            status, content = 500, f"{type(error).__name__}: {error}".encode()
        asked_s = time.monotonic()
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
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(self.headers["X-Path"], arcname=self.headers["X-Name"])
        return packed.getvalue()

    def end(self, body: bytes) -> bytes:
        """Stop."""
        threading.Thread(target=self.server.shutdown, daemon=True).start()
        return b""

    def answer(self, status: int, content: bytes) -> None:
        """Send an answer."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged: commands may hold secrets."""


def watch(server: ThreadingHTTPServer) -> None:
    """End the program when nobody asks any more."""
    while time.monotonic() - asked_s < IDLE_S:
        time.sleep(min(1.0, IDLE_S / 4))
    server.shutdown()


def main() -> None:
    """Serve until asked to end, or until nobody asks."""
    server = ThreadingHTTPServer(("0.0.0.0", int(os.environ.pop("RLKIT_AGENT_PORT", "0"))), Handler)
    threading.Thread(target=watch, args=(server,), daemon=True).start()
    print(READY, server.server_address[1], flush=True)
    server.serve_forever()
    sys.exit(0)


if __name__ == "__main__":
    main()
