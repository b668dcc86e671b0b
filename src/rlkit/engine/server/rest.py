"""The management routes: training runs, checkpoints, sessions, and the download of weights.

Invariant: what these routes tell of runs, checkpoints and finished sessions is read from the disk, so that it is the
same for every server on a root and after a restart. A server has one key and thus one user, who may see all of it.

Not offered, because one machine has no such thing: the audit log, billing events, projects of a session and trace
exports. They answer 404 with the name of the route; the SDK would go on asking for minutes after a 501. `whoami` asks
no server: it reads the user from a JWT, and there is none here.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from datetime import UTC, datetime
from urllib.parse import quote

from pydantic import BaseModel, StrictInt
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from tinker import types

from rlkit.engine.server.sessions import Sessions
from rlkit.engine.storage.checkpoints import Checkpoint, CheckpointStore
from rlkit.engine.storage.session_log import Run, SessionRecord, strings
from rlkit.errors import MissingError, UsageError

_OWNER = "local"
_URL_S = 3600
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


class TtlRequest(BaseModel):
    """The body of `PUT …/ttl`; None lets the checkpoint live for ever."""

    ttl_seconds: StrictInt | None


class Management:
    """One method for each route, called on any thread; of `sessions` it knows which are open."""

    def __init__(self, store: CheckpointStore, sessions: Sessions) -> None:
        self._store = store
        self._sessions = sessions
        self._secret = secrets.token_bytes(32)

    def list_runs(self, request: Request) -> Response:
        """The training runs of the root, newest first."""
        if "project_id" in request.query_params:
            raise UsageError("project_id: the embedded engine has no projects; leave it out")
        offset, limit = _page(request, 20)
        runs = self._store.records.runs()
        page = [self._run_json(run) for run in runs[offset : offset + limit]]
        return JSONResponse({"training_runs": page, "cursor": _cursor(offset, limit, len(runs))})

    def get_run(self, request: Request) -> Response:
        """One training run."""
        return JSONResponse(self._run_json(self._run(request.path_params["model_id"])))

    def list_run_checkpoints(self, request: Request) -> Response:
        """All checkpoints of a training run."""
        run = self._run(request.path_params["model_id"])
        checkpoints = self._store.checkpoints(run.model_id)
        return JSONResponse({"checkpoints": [_checkpoint_json(c) for c in checkpoints]})

    def list_checkpoints(self, request: Request) -> Response:
        """The checkpoints of the root, newest first."""
        offset, limit = _page(request, 100)
        checkpoints = self._store.checkpoints()
        page = [_checkpoint_json(c) for c in checkpoints[offset : offset + limit]]
        return JSONResponse({"checkpoints": page, "cursor": _cursor(offset, limit, len(checkpoints))})

    def delete_checkpoint(self, request: Request) -> Response:
        """Remove a checkpoint."""
        self._store.delete(_path(request))
        return Response(status_code=204)

    def publish(self, request: Request) -> Response:
        """Note that a checkpoint is public (POST) or is not (DELETE); who has the key can read it either way."""
        self._store.set_public(_path(request), request.method == "POST")
        return Response(status_code=204)

    def set_ttl(self, request: Request, body: TtlRequest) -> Response:
        """Set or remove a checkpoint's end."""
        self._store.set_ttl(_path(request), body.ttl_seconds)
        return Response(status_code=204)

    def copy_weights(self, request: Request, body: types.CopyWeightsRequest) -> Response:
        """Copy a checkpoint into a run of its own; the project is not asked for, there are none."""
        if body.session_id is not None and (self._live(body.session_id) is None or body.model_seq_id is None):
            raise MissingError(f"copy_weights: there is no session {body.session_id!r}, or model_seq_id is missing")
        # A resent request carries the same key, and must not make a second copy.
        key = request.headers.get("x-idempotency-key") or secrets.token_hex(8)
        session_id = body.session_id or hashlib.sha256(key.encode()).hexdigest()[:16]
        path = self._store.copy(
            body.source_path, session_id, model_seq_id=body.model_seq_id or 0, ttl_s=body.ttl_seconds
        )
        return JSONResponse({"tinker_path": path})

    def storage(self, _: Request) -> Response:
        """What all checkpoints take on disk."""
        checkpoints = self._store.checkpoints()
        size_bytes = sum(checkpoint.size_bytes for checkpoint in checkpoints)
        usage = {"checkpoint_count": len(checkpoints), "size_bytes": size_bytes, "size_gigabytes": size_bytes / 1e9}
        return JSONResponse({"data": [usage]})

    def note_session(self, session_id: str, body: types.CreateSessionRequest) -> None:
        """Write down what a client says of the session that was opened for it."""
        record = SessionRecord(session_id, self._store.clock(), strings(body.user_metadata), body.display_name)
        self._store.records.add_session(record)

    def list_sessions(self, request: Request) -> Response:
        """The ids of all sessions there ever were, newest first."""
        offset, limit = _page(request, 20)
        sessions = self._store.records.sessions()
        return JSONResponse({"sessions": [session.session_id for session in sessions[offset : offset + limit]]})

    def get_session(self, request: Request) -> Response:
        """A session, its training runs and, while it is open, its sampling sessions."""
        session_id = request.path_params["session_id"]
        session = self._store.records.session(session_id)
        if session is None:
            raise MissingError(f"there is no session {session_id!r}")
        runs = self._store.records.runs(session_id)
        about = {"user_metadata": session.user_metadata, "display_name": session.display_name}
        ids = [run.model_id for run in runs]
        return JSONResponse({"training_run_ids": ids, "sampler_ids": self._live(session_id) or [], **about})

    def search_sessions(self, _: Request, body: types.SessionSearchRequest) -> Response:
        """A page of the sessions that fit, newest first; there are no projects and nobody else's sessions."""
        sessions = self._store.records.sessions()
        found = [session for session in sessions if self._fits(session, body)]
        page = found[: body.limit]
        following = None
        if len(found) > len(page):
            following = {"last_created_at": _time(page[-1].created), "last_session_id": page[-1].session_id}
        return JSONResponse({"sessions": [self._summary(session) for session in page], "next_cursor": following})

    def external_urls(self, request: Request) -> Response:
        """Where each file of an external checkpoint can be fetched without the key, for an hour."""
        path = _path(request)
        checkpoint = self._store.get(path)
        if not checkpoint.id.startswith("external_weights/"):
            raise UsageError(f"{path}: only what save_weights_external wrote can be downloaded")
        expires = int(time.time()) + _URL_S
        base = f"{str(request.base_url).rstrip('/')}/api/v1/downloads"
        urls = {
            file.name: f"{base}/{self._sign(path, file.name, expires)}/{expires}/{quote(path[9:])}/{file.name}"
            for file in sorted(checkpoint.data.iterdir())
        }
        return JSONResponse({"urls": urls, "expires": _time(expires)})

    def download(self, request: Request) -> Response:
        """One file of an external checkpoint; the signature in its URL stands for the key."""
        part = request.path_params
        path, name, expires = _path(request), str(part["file"]), int(part["expires"])
        signature = self._sign(path, name, expires)
        if not hmac.compare_digest(str(part["signature"]).encode(), signature.encode()) or time.time() > expires:
            raise MissingError("this download URL is wrong or over: ask for a new one with get_external_weights_urls")
        file = self._store.get(path).data / name
        if not file.is_file() or file.is_symlink():
            raise MissingError(f"{path} has no file {name!r}")
        return FileResponse(file, media_type="application/octet-stream")

    def not_offered(self, request: Request) -> Response:
        """The answer to a route of the hosted service that has no meaning here."""
        raise MissingError(f"{request.method} {request.url.path} is not offered by the embedded engine")

    def _run(self, model_id: str) -> Run:
        run = self._store.records.run(model_id)
        if run is None:
            raise MissingError(f"there is no training run {model_id!r}")
        return run

    def _run_json(self, run: Run) -> dict[str, object]:
        own = self._store.checkpoints(run.model_id)
        last = {kind: next((_checkpoint_json(c) for c in own if c.id.startswith(f"{kind}/")), None) for kind in _TYPES}
        return {
            "training_run_id": run.model_id,
            "base_model": run.base_model,
            "model_owner": _OWNER,
            "is_lora": True,
            "lora_rank": run.rank,
            "last_request_time": _time(max([run.created, *(checkpoint.created for checkpoint in own)])),
            "last_checkpoint": last["weights"],
            "last_sampler_checkpoint": last["sampler_weights"],
            "user_metadata": run.user_metadata,
        }

    def _live(self, session_id: str) -> list[str] | None:
        """The sampling sessions of an open session; asking does not keep it open."""
        return next((list(session.samplers) for session in self._sessions if session.session_id == session_id), None)

    def _sign(self, path: str, file: str, expires: int) -> str:
        return hmac.digest(self._secret, f"{expires} {path} {file}".encode(), "sha256").hex()

    def _fits(self, session: SessionRecord, wanted: types.SessionSearchRequest) -> bool:
        if wanted.session_id is not None or wanted.display_name is not None:
            words = (wanted.display_name or "").lower().split()
            name = (session.display_name or "").lower()
            if session.session_id != wanted.session_id and not (words and all(word in name for word in words)):
                return False
        if wanted.project_ids is not None and _OWNER not in wanted.project_ids:
            return False
        owner = wanted.owner
        if isinstance(owner, types.UserSearchOwner) and _OWNER not in owner.owner_urns:
            return False
        active = self._live(session.session_id) is not None
        if wanted.statuses is not None and not (active and any(status.type == "active" for status in wanted.statuses)):
            return False
        if not wanted.user_metadata.items() <= (session.user_metadata or {}).items():
            return False
        after = wanted.cursor
        created = datetime.fromtimestamp(session.created, UTC)  # the cursor's precision
        return after is None or (after.last_created_at, session.session_id) > (created, after.last_session_id)

    def _summary(self, session: SessionRecord) -> dict[str, object]:
        own = self._store.checkpoints(session.session_id)
        return {
            "session_id": session.session_id,
            "created_at": _time(session.created),
            "owner": _OWNER,
            "project_id": _OWNER,
            "status": None if self._live(session.session_id) is None else {"type": "active"},
            "checkpoints_count": len(own),
            "checkpoint_storage_bytes": sum(checkpoint.size_bytes for checkpoint in own),
            "display_name": session.display_name,
            "user_metadata": session.user_metadata,
        }


def _checkpoint_json(checkpoint: Checkpoint) -> dict[str, object]:
    return {
        "checkpoint_id": checkpoint.id,
        "checkpoint_type": _TYPES[checkpoint.id.partition("/")[0]],
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
    }


def _path(request: Request) -> str:
    part = request.path_params
    return f"tinker://{part['model_id']}/{part['kind']}/{part['name']}"


def _page(request: Request, limit: int) -> tuple[int, int]:
    values: list[int] = []
    for name, default in (("offset", 0), ("limit", limit)):
        text = request.query_params.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise UsageError(f"{name} must be a number from 0, not {text!r}")
        values.append(int(text))
    return values[0], values[1]


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
