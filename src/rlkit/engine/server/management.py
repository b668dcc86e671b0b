"""Management routes: training runs, checkpoints, sessions, and downloads of weights.

Invariant: runs, checkpoints and finished sessions are read from the disk, so the answers are the same on every server
of a root and after a restart. A server has one key and one user, who has access to everything.

The engine has no audit log, billing events, session projects or trace exports. Their routes answer 404 with the name of
the route, because after a 501 the SDK would retry for minutes. `whoami` needs no server: it reads the user from a JWT.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import quote

from pydantic import BaseModel, StrictInt
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from tinker import types

from rlkit.engine.server.sessions import Sessions
from rlkit.engine.storage.checkpoints import Checkpoint, CheckpointStore
from rlkit.engine.storage.session_records import Run, SessionRecord, stringify_values
from rlkit.errors import MissingError, UsageError

_OWNER = "local"
_URL_S = 3600
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


class TtlRequest(BaseModel):
    """The body of `PUT …/ttl`; with None the checkpoint never expires."""

    ttl_seconds: StrictInt | None


class Management:
    """Handlers of the management routes, called on any thread."""

    def __init__(self, store: CheckpointStore, sessions: Sessions) -> None:
        self._store = store
        self._sessions = sessions
        self._secret = secrets.token_bytes(32)

    def list_runs(self, request: Request) -> Response:
        """List the training runs of the root, newest first."""
        if "project_id" in request.query_params:
            raise UsageError("project_id: the embedded engine has no projects; leave it out")
        runs, cursor = _paginate(request, self._store.records.runs(), 20)
        return JSONResponse({"training_runs": [self._encode_run(run) for run in runs], "cursor": cursor})

    def get_run(self, request: Request) -> Response:
        """Return a training run."""
        return JSONResponse(self._encode_run(self._run(request.path_params["model_id"])))

    def list_run_checkpoints(self, request: Request) -> Response:
        """List all checkpoints of a training run."""
        run = self._run(request.path_params["model_id"])
        checkpoints = self._store.checkpoints(run.model_id)
        return JSONResponse({"checkpoints": [_encode_checkpoint(checkpoint) for checkpoint in checkpoints]})

    def list_checkpoints(self, request: Request) -> Response:
        """List the checkpoints of the root, newest first."""
        checkpoints, cursor = _paginate(request, self._store.checkpoints(), 100)
        page = [_encode_checkpoint(checkpoint) for checkpoint in checkpoints]
        return JSONResponse({"checkpoints": page, "cursor": cursor})

    def delete_checkpoint(self, request: Request) -> Response:
        """Delete a checkpoint."""
        self._store.delete(_checkpoint_path(request))
        return Response(status_code=204)

    def publish(self, request: Request) -> Response:
        """Mark a checkpoint as public (POST) or private (DELETE); the key gives access to both."""
        self._store.set_public(_checkpoint_path(request), request.method == "POST")
        return Response(status_code=204)

    def set_ttl(self, request: Request, body: TtlRequest) -> Response:
        """Set or remove the time at which a checkpoint expires."""
        self._store.set_ttl(_checkpoint_path(request), body.ttl_seconds)
        return Response(status_code=204)

    def copy_weights(self, request: Request, body: types.CopyWeightsRequest) -> Response:
        """Copy a checkpoint into a new run; the project is ignored."""
        if body.session_id is not None and (self._sampler_ids(body.session_id) is None or body.model_seq_id is None):
            raise MissingError(f"copy_weights: no session {body.session_id!r}, or model_seq_id is missing")
        # A resent request has the same key, and must not make a second copy.
        key = request.headers.get("x-idempotency-key") or secrets.token_hex(8)
        session_id = body.session_id or hashlib.sha256(key.encode()).hexdigest()[:16]
        path = self._store.copy(
            body.source_path, session_id, model_seq_id=body.model_seq_id or 0, ttl_s=body.ttl_seconds
        )
        return JSONResponse({"tinker_path": path})

    def storage(self, _: Request) -> Response:
        """Return the number of checkpoints and their size on disk."""
        checkpoints = self._store.checkpoints()
        size_bytes = sum(checkpoint.size_bytes for checkpoint in checkpoints)
        usage = {"checkpoint_count": len(checkpoints), "size_bytes": size_bytes, "size_gigabytes": size_bytes / 1e9}
        return JSONResponse({"data": [usage]})

    def record_session(self, session_id: str, body: types.CreateSessionRequest) -> None:
        """Write the record of a new session."""
        record = SessionRecord(session_id, self._store.clock(), stringify_values(body.user_metadata), body.display_name)
        self._store.records.add_session(record)

    def list_sessions(self, request: Request) -> Response:
        """List the ids of all recorded sessions, newest first."""
        sessions, _ = _paginate(request, self._store.records.sessions(), 20)
        return JSONResponse({"sessions": [session.session_id for session in sessions]})

    def get_session(self, request: Request) -> Response:
        """Return a session, its training runs and, while it is open, its sampling sessions."""
        session_id = request.path_params["session_id"]
        session = self._store.records.session(session_id)
        if session is None:
            raise MissingError(f"no session {session_id!r}")
        runs = self._store.records.runs(session_id)
        return JSONResponse(
            {
                "training_run_ids": [run.model_id for run in runs],
                "sampler_ids": self._sampler_ids(session_id) or [],
                "user_metadata": session.user_metadata,
                "display_name": session.display_name,
            }
        )

    def search_sessions(self, _: Request, body: types.SessionSearchRequest) -> Response:
        """Return a page of the matching sessions, newest first."""
        matches = [session for session in self._store.records.sessions() if self._is_match(session, body)]
        page = matches[: body.limit]
        cursor = None
        if len(matches) > len(page):
            cursor = {"last_created_at": _encode_time(page[-1].created), "last_session_id": page[-1].session_id}
        return JSONResponse({"sessions": [self._encode_session(session) for session in page], "next_cursor": cursor})

    def external_urls(self, request: Request) -> Response:
        """Return a URL for each file of an external checkpoint, valid without the key for an hour."""
        path = _checkpoint_path(request)
        checkpoint = self._store.get(path)
        if checkpoint.kind != "external_weights":
            raise UsageError(f"{path}: only checkpoints of save_weights_external can be downloaded")
        expires = int(time.time()) + _URL_S
        base = f"{str(request.base_url).rstrip('/')}/api/v1/downloads"
        urls = {
            file.name: f"{base}/{self._sign(path, file.name, expires)}/{expires}/{quote(path[9:])}/{file.name}"
            for file in sorted(checkpoint.data.iterdir())
        }
        return JSONResponse({"urls": urls, "expires": _encode_time(expires)})

    def download(self, request: Request) -> Response:
        """Return a file of an external checkpoint; the signature in its URL replaces the key."""
        params = request.path_params
        path, name, expires = _checkpoint_path(request), str(params["file"]), int(params["expires"])
        signature = self._sign(path, name, expires)
        if not hmac.compare_digest(str(params["signature"]).encode(), signature.encode()) or time.time() > expires:
            raise MissingError("this download URL is invalid or expired: get a new one with get_external_weights_urls")
        file = self._store.get(path).data / name
        if not file.is_file() or file.is_symlink():
            raise MissingError(f"{path} has no file {name!r}")
        return FileResponse(file, media_type="application/octet-stream")

    def _run(self, model_id: str) -> Run:
        run = self._store.records.run(model_id)
        if run is None:
            raise MissingError(f"no training run {model_id!r}")
        return run

    def _encode_run(self, run: Run) -> dict[str, object]:
        checkpoints = self._store.checkpoints(run.model_id)
        newest = {checkpoint.kind: _encode_checkpoint(checkpoint) for checkpoint in reversed(checkpoints)}
        return {
            "training_run_id": run.model_id,
            "base_model": run.base_model,
            "model_owner": _OWNER,
            "is_lora": True,
            "lora_rank": run.rank,
            "last_request_time": _encode_time(max([run.created, *(checkpoint.created for checkpoint in checkpoints)])),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": run.user_metadata,
        }

    def _sampler_ids(self, session_id: str) -> list[str] | None:
        """Return the sampling sessions of a session without extending its life; None if it is not open."""
        return next((list(session.samplers) for session in self._sessions if session.session_id == session_id), None)

    def _sign(self, path: str, file: str, expires: int) -> str:
        return hmac.digest(self._secret, f"{expires} {path} {file}".encode(), "sha256").hex()

    def _is_match(self, session: SessionRecord, query: types.SessionSearchRequest) -> bool:
        if query.session_id is not None or query.display_name is not None:
            words = (query.display_name or "").lower().split()
            name = (session.display_name or "").lower()
            if session.session_id != query.session_id and not (words and all(word in name for word in words)):
                return False
        if query.project_ids is not None and _OWNER not in query.project_ids:
            return False
        if isinstance(query.owner, types.UserSearchOwner) and _OWNER not in query.owner.owner_urns:
            return False
        is_open = self._sampler_ids(session.session_id) is not None
        if query.statuses is not None and not (is_open and any(status.type == "active" for status in query.statuses)):
            return False
        if not query.user_metadata.items() <= (session.user_metadata or {}).items():
            return False
        after = query.cursor
        created = datetime.fromtimestamp(session.created, UTC)  # the cursor's precision
        return after is None or (after.last_created_at, session.session_id) > (created, after.last_session_id)

    def _encode_session(self, session: SessionRecord) -> dict[str, object]:
        checkpoints = self._store.checkpoints(session.session_id)
        return {
            "session_id": session.session_id,
            "created_at": _encode_time(session.created),
            "owner": _OWNER,
            "project_id": _OWNER,
            "status": None if self._sampler_ids(session.session_id) is None else {"type": "active"},
            "checkpoints_count": len(checkpoints),
            "checkpoint_storage_bytes": sum(checkpoint.size_bytes for checkpoint in checkpoints),
            "display_name": session.display_name,
            "user_metadata": session.user_metadata,
        }


def _encode_checkpoint(checkpoint: Checkpoint) -> dict[str, object]:
    return {
        "checkpoint_id": checkpoint.id,
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": _encode_time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires is None else _encode_time(checkpoint.expires),
    }


def _checkpoint_path(request: Request) -> str:
    params = request.path_params
    return f"tinker://{params['model_id']}/{params['kind']}/{params['name']}"


def _paginate[T](request: Request, items: Sequence[T], default_limit: int) -> tuple[Sequence[T], dict[str, int]]:
    """Return the page of `items` that a list request asks for, and its cursor."""
    page = {"offset": 0, "limit": default_limit}
    for name, default in page.items():
        text = request.query_params.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise UsageError(f"{name} must be a whole number ≥ 0, not {text!r}")
        page[name] = int(text)
    return items[page["offset"] : page["offset"] + page["limit"]], {**page, "total_count": len(items)}


def _encode_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
