"""What is written down of sessions and training runs, so that a client can be told of them after a restart.

Invariant: a record is there whole or not at all, and no id that a client gives can lead outside the root. It is there
as long as any checkpoint that it is about, and for a month otherwise.

    <root>/.sessions/<session id>.json    what a client said of itself
    <root>/<model id>/run.json            what a model was made from
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from rlkit.engine.storage.files import locked, read_json, write_json

_KEPT_S = 30 * 24 * 3600.0

SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MODEL_ID = re.compile(rf"{SESSION_ID.pattern}:train:[0-9]{{1,10}}")


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What a client said of itself when it opened a session; `created` is in seconds since 1970."""

    session_id: str
    created: float
    user_metadata: Mapping[str, str] | None = None
    display_name: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A training run: a model that was made, or a copied checkpoint; `created` is in seconds since 1970."""

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
        """Write down a session."""
        with locked(self._root, fcntl.LOCK_SH):
            write_json(self._root / ".sessions" / f"{session.session_id}.json", asdict(session))

    def sessions(self) -> list[SessionRecord]:
        """The sessions that are remembered, newest first."""
        files = (self._root / ".sessions").glob("*.json")
        found = [session for file in files if (session := read_json(file, _SESSION))]
        return sorted(found, key=lambda session: (-session.created, session.session_id))

    def session(self, session_id: str) -> SessionRecord | None:
        """One session."""
        if not SESSION_ID.fullmatch(session_id):
            return None
        return read_json(self._root / ".sessions" / f"{session_id}.json", _SESSION)

    def add_run(self, run: Run) -> None:
        """Write down a training run."""
        with locked(self._root, fcntl.LOCK_SH):
            write_json(self.folder(run.model_id) / "run.json", asdict(run))

    def run(self, model_id: str) -> Run | None:
        """One training run."""
        return next(iter(self.runs(model_id)), None) if MODEL_ID.fullmatch(model_id) else None

    def runs(self, owner: str | None = None) -> list[Run]:
        """The training runs, newest first: of `owner`, as `folders` takes it."""
        found = [run for folder in self.folders(owner) if (run := read_json(folder / "run.json", _RUN))]
        return sorted(found, key=lambda run: (-run.created, run.model_id))

    def folder(self, model_id: str) -> Path:
        """The folder of a training run, which is a `MODEL_ID`."""
        return self._root / model_id.replace(":", "_")

    def folders(self, owner: str | None = None) -> list[Path]:
        """The folders of training runs that are there: of `owner`, the id of a model or of a session, or all."""
        if owner is None or SESSION_ID.fullmatch(owner):
            found = self._root.glob(f"{owner or '*'}_train_*")
            found = (folder for folder in found if owner in (None, folder.name.rpartition("_train_")[0]))
        else:
            found = [self.folder(owner)] if MODEL_ID.fullmatch(owner) else []
        return [folder for folder in found if folder.is_dir() and not folder.is_symlink()]

    def sweep(self, now_s: float) -> None:
        """Remove what a killed server left half-written, and what was a month ago and left no checkpoint.

        The caller holds the root's lock exclusively, and has removed what is left of checkpoints that are gone.
        """
        for folder in (*self.folders(), self._root / ".sessions"):
            for file in folder.glob(".*.tmp"):
                file.unlink()
        for folder in self.folders():
            run = read_json(folder / "run.json", _RUN)
            if run is not None and run.created + _KEPT_S < now_s and not any(folder.glob("*/*")):
                (folder / "run.json").unlink()
                with suppress(OSError):  # somebody else has put something there
                    for kind in folder.iterdir():
                        kind.rmdir()
                    folder.rmdir()
        in_use = {folder.name.rpartition("_train_")[0] for folder in self.folders()}
        for file in (self._root / ".sessions").glob("*.json"):
            session = read_json(file, _SESSION)
            if session is not None and session.created + _KEPT_S < now_s and file.stem not in in_use:
                file.unlink()


def strings(metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    """Metadata as the SDK reads it back: it sends any values and accepts strings only."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}
