"""A server with the part of the Hugging Face hub's protocol that its libraries speak to read datasets.

It stands in for the hosted hub, which tests cannot ask: repositories with a README, folders, configurations, splits and
files in several parts, at any number of commits. As on the hub, data files lie in a store of their own, to which
`resolve` redirects.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pyarrow
from pyarrow import parquet

from tests.limits import HANG_S

type Rows = Sequence[Mapping[str, object]]
type Files = Mapping[str, bytes]
"""The files of a repository at one commit, by path."""
type Response = tuple[int, bytes, dict[str, str]]

_JSON = {"Content-Type": "application/json"}


def parquet_file(rows: Rows, schema: pyarrow.Schema | None = None, *, row_group_size: int | None = None) -> bytes:
    """Rows as a Parquet file; the types are those of the schema, or follow from the rows."""
    file = io.BytesIO()
    table = pyarrow.Table.from_pylist([dict(row) for row in rows], schema=schema)
    parquet.write_table(table, file, row_group_size=row_group_size)
    return file.getvalue()


def json_lines(rows: Rows) -> bytes:
    """Rows as a file of JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def one_table(rows: Rows) -> Files:
    """A repository of one Parquet file, which is its split `train`."""
    return {"train-00000.parquet": parquet_file(rows)}


@dataclass
class FakeHub:
    """Simulated hub: the commits of each repository, the newest last, and the files of each commit."""

    repositories: Mapping[str, Mapping[str, Files]]
    url: str = ""
    read: Counter[str] = field(default_factory=Counter[str])
    """The bytes of data files that were read, by commit."""

    def answer(self, path: str, byte_range: str | None) -> Response:
        """The response to a request for a path, limited to a range of bytes if one is requested."""
        parts = unquote(path.partition("?")[0]).strip("/").split("/")
        kind = parts[0]
        if kind == "api" and parts[1] == "datasets":
            return self._api("/".join(parts[2:4]), parts[4:])
        if kind in ("datasets", "store") and len(parts) > 5:
            return self._file("/".join(parts[1:3]), parts[4], "/".join(parts[5:]), byte_range, stored=kind == "store")
        return _missing("EntryNotFound")

    def _api(self, repository: str, rest: list[str]) -> Response:
        commits = self.repositories.get(repository)
        if commits is None:
            return _missing("RepoNotFound")
        kind, commit, *folder = rest or ["revision", "main"]
        commit = [*commits][-1] if commit == "main" else commit
        if commit not in commits:
            return _missing("RevisionNotFound")
        files = commits[commit]
        match kind:
            case "revision":
                body = _about(repository, commit, files)
            case "tree":
                body = list(_entries(files, "/".join(folder)))
                if folder and not body:
                    return _missing("EntryNotFound")
            case _:
                return _missing("EntryNotFound")
        return 200, json.dumps(body).encode(), _JSON

    def _file(self, repository: str, commit: str, path: str, byte_range: str | None, *, stored: bool) -> Response:
        commits = self.repositories.get(repository, {})
        if path not in commits.get(commit, {}):
            return _missing("EntryNotFound" if commit in commits else "RevisionNotFound")
        data = commits[commit][path]
        headers = {"ETag": f'"{sha256(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if path.endswith((".md", ".json", ".yaml")):
            return _part(data, byte_range, headers)
        if not stored:
            linked = {"X-Linked-Size": str(len(data)), "X-Linked-ETag": headers["ETag"]}
            return 302, b"", headers | linked | {"Location": f"{self.url}/store/{repository}/at/{commit}/{path}"}
        response = _part(data, byte_range, headers)
        self.read[commit] += len(response[1])
        return response


def _missing(code: str) -> Response:
    return 404, json.dumps({"error": code}).encode(), _JSON | {"X-Error-Code": code}


def _about(repository: str, commit: str, files: Files) -> dict[str, object]:
    siblings = [{"rfilename": name} for name in files]
    flags = {"private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
    return {"_id": "0", "id": repository, "sha": commit, "siblings": siblings} | flags


def _entry(path: str, data: bytes) -> dict[str, object]:
    oid = sha256(data).hexdigest()
    stored = {"oid": oid, "size": len(data), "pointerSize": 134}
    return {"type": "file", "path": path, "size": len(data), "oid": oid[:40], "lfs": stored}


def _entries(files: Files, folder: str) -> Iterator[dict[str, object]]:
    """The files and folders below a folder, in the form of the hub."""
    within = f"{folder}/" if folder else ""
    listed_folders = set[str]()
    for path, data in files.items():
        if not path.startswith(within):
            continue
        parents = path.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            parent = "/".join(parents[:depth])
            if parent.startswith(within) and parent not in listed_folders:
                listed_folders.add(parent)
                yield {"type": "directory", "path": parent, "size": 0, "oid": "0" * 40}
        yield _entry(path, data)


def _part(data: bytes, byte_range: str | None, headers: dict[str, str]) -> Response:
    if byte_range is None:
        return 200, data, headers
    first, _, last = byte_range.removeprefix("bytes=").partition("-")
    part = data[int(first) : int(last) + 1 if last else None]
    return 206, part, headers | {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"}


@contextmanager
def fake_hub(repositories: Mapping[str, Mapping[str, Files]]) -> Generator[FakeHub]:
    """Serve a simulated hub on this machine."""
    hub = FakeHub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, data, headers = hub.answer(self.path, self.headers.get("Range"))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

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


_LOAD = """
import json, os, sys
from rlkit.envs.math import maths
from rlkit.errors import RlkitError

for cache, recorded_commits, arguments in json.loads(sys.argv[1]):
    os.environ["RLKIT_CACHE_DIR"] = cache
    recorded, notes, answers, error = None, [], [], None
    def record(now):
        global recorded
        recorded = now
        return recorded_commits or now
    try:
        tasks = maths(order="dataset", pin=record, note=notes.append, **arguments)
        answers = [task.problem.answer for task in tasks]
    except RlkitError as raised:
        error = f"{type(raised).__name__}: {raised}"
    print(json.dumps([answers, recorded, notes, error]))
"""
"""In a process of its own: the hub's libraries read their settings when they are imported."""


@dataclass(frozen=True)
class LoadRequest:
    """A dataset to load.

    Args:
        cache: cache folder of rlkit.
        arguments: arguments of `maths`.
        recorded_commits: commits in the record of a run.
    """

    cache: Path
    arguments: Mapping[str, object]
    recorded_commits: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class LoadResult:
    """Result of a load: the answers in the order of the rows, the recorded commits, the notes, the error if any."""

    answers: list[str]
    recorded: dict[str, str] | None
    notes: list[str]
    error: str | None


def load(hub: FakeHub, *requests: LoadRequest) -> list[LoadResult]:
    """Load datasets one after the other with the hub's own libraries."""
    home = str(requests[0].cache / "hub")
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_HUB_DISABLE_TELEMETRY": "1"}
    arguments = json.dumps([[str(request.cache), request.recorded_commits, request.arguments] for request in requests])
    command = [sys.executable, "-c", _LOAD, arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert process.returncode == 0, process.stderr
    return [LoadResult(*json.loads(line)) for line in process.stdout.splitlines()]
