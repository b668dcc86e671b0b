"""Records of sessions and training runs, which outlive the server.

Invariant: a record exists only when it is complete, and ids from clients cannot lead outside the root. A record is kept
as long as any checkpoint of its run or session, and for at least a month.

    <root>/.sessions/<session id>.json    a client's description of its session
    <root>/<model id>/run.json            base model and rank of a model in training
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from rlkit.engine.storage.files import hold_lock, read_json, write_json

_RETENTION_S = 30 * 24 * 3600.0

SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MODEL_ID = re.compile(rf"{SESSION_ID.pattern}:train:[0-9]{{1,10}}")


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A client's description of its session; `created` is in seconds since 1970."""

    session_id: str
    created: float
    user_metadata: Mapping[str, str] | None = None
    display_name: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A training run: a model in training, or a copied checkpoint; `created` is in seconds since 1970."""

    model_id: str
    base_model: str
    rank: int
    created: float
    user_metadata: Mapping[str, str] | None = None


_SESSION, _RUN = TypeAdapter(SessionRecord), TypeAdapter(Run)


class Records:
    """The sessions and training runs below a root folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def add_session(self, session: SessionRecord) -> None:
        """Write the record of a session."""
        with hold_lock(self._root, fcntl.LOCK_SH):
            write_json(self._root / ".sessions" / f"{session.session_id}.json", asdict(session))

    def sessions(self) -> list[SessionRecord]:
        """Return the recorded sessions, newest first."""
        files = (self._root / ".sessions").glob("*.json")
        sessions = [session for file in files if (session := read_json(file, _SESSION))]
        return sorted(sessions, key=lambda session: (-session.created, session.session_id))

    def session(self, session_id: str) -> SessionRecord | None:
        """Return the record of a session, if there is one."""
        if not SESSION_ID.fullmatch(session_id):
            return None
        return read_json(self._root / ".sessions" / f"{session_id}.json", _SESSION)

    def add_run(self, run: Run) -> None:
        """Write the record of a training run."""
        with hold_lock(self._root, fcntl.LOCK_SH):
            write_json(self.folder(run.model_id) / "run.json", asdict(run))

    def run(self, model_id: str) -> Run | None:
        """Return the record of a training run, if there is one."""
        return next(iter(self.runs(model_id)), None) if MODEL_ID.fullmatch(model_id) else None

    def runs(self, owner: str | None = None) -> list[Run]:
        """Return all training runs, or those of the session or model with the id `owner`, newest first."""
        runs = [run for folder in self.folders(owner) if (run := read_json(folder / "run.json", _RUN))]
        return sorted(runs, key=lambda run: (-run.created, run.model_id))

    def folder(self, model_id: str) -> Path:
        """Return the folder of a training run; `model_id` matches `MODEL_ID`."""
        return self._root / model_id.replace(":", "_")

    def folders(self, owner: str | None = None) -> list[Path]:
        """Return the folders of all training runs, or of those of the session or model with the id `owner`."""
        if owner is None or SESSION_ID.fullmatch(owner):
            folders = self._root.glob(f"{owner or '*'}_train_*")
            folders = (folder for folder in folders if owner in (None, folder.name.rpartition("_train_")[0]))
        else:
            folders = [self.folder(owner)] if MODEL_ID.fullmatch(owner) else []
        return [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]

    def sweep(self, now_s: float) -> None:
        """Remove partial files of killed servers, and records that are older than a month and have no checkpoint.

        The caller holds the root's lock exclusively, and has removed expired and partial checkpoints.
        """
        for folder in (*self.folders(), self._root / ".sessions"):
            for file in folder.glob(".*.tmp"):
                file.unlink()
        for folder in self.folders():
            run = read_json(folder / "run.json", _RUN)
            if run is not None and run.created + _RETENTION_S < now_s and not any(folder.glob("*/*")):
                (folder / "run.json").unlink()
                with suppress(OSError):  # the folder holds other files
                    for kind_folder in folder.iterdir():
                        kind_folder.rmdir()
                    folder.rmdir()
        in_use = {folder.name.rpartition("_train_")[0] for folder in self.folders()}
        for file in (self._root / ".sessions").glob("*.json"):
            session = read_json(file, _SESSION)
            if session is not None and session.created + _RETENTION_S < now_s and file.stem not in in_use:
                file.unlink()


def stringify_values(metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    """Convert the values to strings, because the SDK sends any values but only reads strings."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}
