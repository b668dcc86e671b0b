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
class StoredRun:
    """Run as stored by the server."""

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
    """Stub of the server, which records its requests."""

    url: str = ""
    runs: dict[str, StoredRun] = field(default_factory=dict[str, StoredRun])
    bodies: list[bytes] = field(default_factory=list[bytes])

    @property
    def environ(self) -> Mapping[str, str]:
        """Environment variables that select this server."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": _KEY}

    async def answer_query(self, request: Request) -> Response:
        """`POST /graphql`."""
        self.bodies.append(await request.body())
        query = json.loads(self.bodies[-1])
        return JSONResponse({"data": self._answer_operation(query["operationName"], query.get("variables") or {})})

    def _answer_operation(self, operation: str, variables: Mapping[str, Any]) -> dict[str, Any]:
        match operation:
            case "RunResumeStatus":
                run = self.runs.get(variables["name"])
                project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": variables["entity"]}}
                return {"model": {**project, "bucket": None if run is None else _bucket(run)}}
            case "UpsertBucket":
                run = self.runs.setdefault(
                    variables["name"], StoredRun(variables["name"], variables["project"], variables["entity"] or "me")
                )
                run.name, run.tags = variables["displayName"] or run.name, variables["tags"] or run.tags
                if variables["config"]:
                    config = json.loads(variables["config"])
                    run.config |= {key: entry["value"] for key, entry in config.items() if key != "_wandb"}
                project = {"id": "p", "name": run.project, "entity": {"id": "e", "name": run.entity}}
                return {"upsertBucket": {"bucket": {**_bucket(run), "project": project}, "inserted": True}}
            case "CreateArtifact":  # as one that is there, so that it is not sent
                config = {"id": "a", "state": "COMMITTED", "artifactSequence": {"latestArtifact": None}}
                return {"createArtifact": {"artifact": config}}
            case "CreateRunFiles":
                place = f"{self.url}/upload/{variables['run']}"
                files = [{"name": name, "uploadUrl": f"{place}/{name}"} for name in variables["files"]]
                return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
            case _:  # who has the key, what the server can do, and what types of tables there are
                viewer: dict[str, object] = {"id": "v", "entity": "us", "username": "us", "flags": "{}", "teams": {}}
                return {"viewer": viewer, "project": None}

    async def stream(self, request: Request) -> Response:
        """`POST /files/…/ID/file_stream`."""
        self.bodies.append(await request.body())
        run, update = self.runs[request.path_params["run"]], json.loads(self.bodies[-1])
        if lines := update.get("files", {}).get("wandb-history.jsonl"):
            run.steps[lines["offset"] :] = map(json.loads, lines["content"])
        run.exit_code = update.get("exitcode", run.exit_code)
        return JSONResponse({})

    async def upload(self, request: Request) -> Response:
        """`PUT /upload/ID/NAME`."""
        self.bodies.append(await request.body())
        self.runs[request.path_params["run"]].files[request.path_params["name"]] = self.bodies[-1]
        return JSONResponse({})

    async def add_telemetry(self, request: Request) -> Response:
        """Accept telemetry."""
        self.bodies.append(await request.body())
        return JSONResponse({})


def _bucket(run: StoredRun) -> dict[str, Any]:
    lines = len(run.steps)
    description = {"id": run.id, "name": run.id, "displayName": run.name, "tags": run.tags, "sweepName": None}
    counts = {"historyLineCount": lines, "eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]"}
    tail = json.dumps([json.dumps(step) for step in run.steps[-1:]])
    config = json.dumps({key: {"value": value} for key, value in run.config.items()})
    return {
        **description,
        **counts,
        "historyTail": tail,
        "config": config,
        "summaryMetrics": "{}",
        "wandbConfig": '{"t": 1}',
    }


@contextmanager
def wandb_stub() -> Generator[WandbStub]:
    """Run a stub of the server."""
    server = WandbStub()
    routes = [
        Route("/graphql", server.answer_query, methods=["POST"]),
        Route("/files/{entity}/{project}/{run}/file_stream", server.stream, methods=["POST"]),
        Route("/upload/{run}/{name:path}", server.upload, methods=["PUT"]),
        Route("/{path:path}", server.add_telemetry, methods=["GET", "POST"]),
    ]
    with listening(Starlette(routes=routes)) as server.url:
        yield server


def sync_offline_runs(directory: Path) -> tuple[list[StoredRun], list[bytes]]:
    """Sync each offline folder of a run with `wandb sync`, oldest first; return the runs and all request bodies."""
    folders = sorted((directory / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
    runs, bodies = list[StoredRun](), list[bytes]()
    for folder in folders:
        with wandb_stub() as server:
            command = [sys.executable, "-m", "wandb", "sync", str(folder)]
            environ = {**os.environ, **server.environ}
            subprocess.run(command, cwd=directory, env=environ, check=True, capture_output=True)
        runs += server.runs.values()
        bodies += server.bodies
    return runs, bodies
