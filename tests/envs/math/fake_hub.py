"""The part of the Hugging Face hub's protocol that the `datasets` library speaks to read a repository of Parquet files.

It stands in for the hosted hub, which tests cannot ask.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
from pyarrow import parquet

type Rows = Sequence[Mapping[str, object]]

_FILE = "train-00000.parquet"


@dataclass
class FakeHub:
    """What the hub has: by repository its commits, the newest last, and by commit the rows of its `train` split."""

    repositories: Mapping[str, Mapping[str, Rows]]
    url: str = ""
    read: list[str] = field(default_factory=list)
    """The commits of which a file was read."""

    def answer(self, path: str, asked: str | None) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of a request for `path`, and in it of the bytes that are `asked` for."""
        parts = path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "datasets"]:
            return self._about("/".join(parts[2:4]), parts[4:])
        if parts[0] == "datasets" and parts[3] == "resolve" and parts[5] == _FILE:
            self.read.append(parts[4])
            data = _parquet(self.repositories["/".join(parts[1:3])][parts[4]])
            return _part(data, asked, {"ETag": f'"{parts[4]}"', "X-Repo-Commit": parts[4]})
        return _MISSING

    def _about(self, repository: str, rest: list[str]) -> tuple[int, bytes, dict[str, str]]:
        commits = self.repositories.get(repository, {})
        if not commits:
            return 404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}
        wanted = rest[1] if rest else [*commits][-1]
        if rest[:1] == ["tree"]:
            file = {"type": "file", "path": _FILE, "size": len(_parquet(commits[wanted])), "oid": "0" * 40}
            return (200, json.dumps([file]).encode(), _JSON) if len(rest) == 2 else _MISSING
        about: dict[str, object] = {"_id": "0", "id": repository, "sha": wanted, "siblings": [{"rfilename": _FILE}]}
        about |= {"private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        return 200, json.dumps(about).encode(), _JSON


_JSON = {"Content-Type": "application/json"}
_MISSING = (404, b'{"error": "Entry not found"}', {"X-Error-Code": "EntryNotFound"})


def _part(data: bytes, asked: str | None, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
    if asked is None:
        return 200, data, headers
    first, _, last = asked.removeprefix("bytes=").partition("-")
    part = data[int(first) : int(last) + 1 if last else None]
    return 206, part, headers | {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"}


def _parquet(rows: Rows) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), file)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  pyarrow has no types
    return file.getvalue()


@contextmanager
def fake_hub(repositories: Mapping[str, Mapping[str, Rows]]) -> Generator[FakeHub]:
    """One that answers on this machine."""
    hub = FakeHub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, body, headers = hub.answer(self.path, self.headers.get("Range"))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Tests are silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        serving.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            serving.join()
