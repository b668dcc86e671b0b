"""A stub of the server of Weights & Biases, to which its own programs send a run.

Files that were written offline are in a format that only its own program reads, the one behind `wandb sync`. So they
are synced to this server, and what arrives is what a person would see.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.trackers.stubs import listening

_KEY = "0" * 40


@dataclass
class Shown:
    """A run as it is shown."""

    id: str
    project: str
    entity: str
    name: str = ""
    tags: list[str] = field(default_factory=list[str])
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    exit_code: int | None = None


@dataclass
class WandbStub:
    """What the server was sent."""

    url: str = ""
    runs: dict[str, Shown] = field(default_factory=dict[str, Shown])
    bodies: list[bytes] = field(default_factory=list[bytes])

    @property
    def environ(self) -> Mapping[str, str]:
        """Variables that lead to it."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": _KEY}

    async def ask(self, request: Request) -> Response:
        """`POST /graphql`."""
        self.bodies.append(await request.body())
        asked = json.loads(self.bodies[-1])
        return JSONResponse({"data": self._answered(asked["operationName"], asked.get("variables") or {})})

    def _answered(self, operation: str, given: Mapping[str, Any]) -> dict[str, Any]:
        match operation:
            case "RunResumeStatus":
                run = self.runs.get(given["name"])
                project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": given["entity"]}}
                return {"model": {**project, "bucket": None if run is None else _bucket(run)}}
            case "UpsertBucket":
                run = self.runs.setdefault(
                    given["name"], Shown(given["name"], given["project"], given["entity"] or "me")
                )
                run.name, run.tags = given["displayName"] or run.name, given["tags"] or run.tags
                if given["config"]:
                    held = json.loads(given["config"])
                    run.config |= {key: one["value"] for key, one in held.items() if key != "_wandb"}
                project = {"id": "p", "name": run.project, "entity": {"id": "e", "name": run.entity}}
                return {"upsertBucket": {"bucket": {**_bucket(run), "project": project}, "inserted": True}}
            case "CreateArtifact":  # as one that is there, so that it is not sent
                held = {"id": "a", "state": "COMMITTED", "artifactSequence": {"latestArtifact": None}}
                return {"createArtifact": {"artifact": held}}
            case "CreateRunFiles":
                place = f"{self.url}/upload/{given['run']}"
                files = [{"name": name, "uploadUrl": f"{place}/{name}"} for name in given["files"]]
                return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
            case _:  # who has the key, what the server can do, and what types of tables there are
                viewer: dict[str, object] = {"id": "v", "entity": "us", "username": "us", "flags": "{}", "teams": {}}
                return {"viewer": viewer, "project": None}

    async def stream(self, request: Request) -> Response:
        """`POST /files/…/ID/file_stream`."""
        self.bodies.append(await request.body())
        run, sent = self.runs[request.path_params["run"]], json.loads(self.bodies[-1])
        if lines := sent.get("files", {}).get("wandb-history.jsonl"):
            run.steps[lines["offset"] :] = map(json.loads, lines["content"])
        run.exit_code = sent.get("exitcode", run.exit_code)
        return JSONResponse({})

    async def upload(self, request: Request) -> Response:
        """`PUT /upload/ID/NAME`."""
        self.bodies.append(await request.body())
        self.runs[request.path_params["run"]].files[request.path_params["name"]] = self.bodies[-1]
        return JSONResponse({})

    async def other(self, request: Request) -> Response:
        """Measurements of its own."""
        self.bodies.append(await request.body())
        return JSONResponse({})


def _bucket(run: Shown) -> dict[str, Any]:
    lines = len(run.steps)
    known = {"id": run.id, "name": run.id, "displayName": run.name, "tags": run.tags, "sweepName": None}
    counts = {"historyLineCount": lines, "eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]"}
    tail = json.dumps([json.dumps(one) for one in run.steps[-1:]])
    held = json.dumps({key: {"value": value} for key, value in run.config.items()})
    return {**known, **counts, "historyTail": tail, "config": held, "summaryMetrics": "{}", "wandbConfig": '{"t": 1}'}


@contextmanager
def wandb_stub() -> Generator[WandbStub]:
    """A stub of the server."""
    found = WandbStub()
    routes = [
        Route("/graphql", found.ask, methods=["POST"]),
        Route("/files/{entity}/{project}/{run}/file_stream", found.stream, methods=["POST"]),
        Route("/upload/{run}/{name:path}", found.upload, methods=["PUT"]),
        Route("/{path:path}", found.other, methods=["GET", "POST"]),
    ]
    with listening(Starlette(routes=routes)) as found.url:
        yield found


def synced(directory: Path) -> tuple[list[Shown], list[bytes]]:
    """What `wandb sync` makes of each folder that a run has written offline, oldest first, and all that it sends."""
    folders = sorted((directory / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
    shown, bodies = list[Shown](), list[bytes]()
    for folder in folders:
        with wandb_stub() as server:
            command = [sys.executable, "-m", "wandb", "sync", str(folder)]
            environ = {**os.environ, **server.environ}
            subprocess.run(command, cwd=directory, env=environ, check=True, capture_output=True)
        shown += server.runs.values()
        bodies += server.bodies
    return shown, bodies
