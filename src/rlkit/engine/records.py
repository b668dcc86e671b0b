"""What is written down of sessions and training runs, so that a client can be told of them after a restart.

Invariant: a record is there whole or not at all, and no id that a client gives can lead outside the root.

    <root>/.sessions/<session id>.json    what a client said of itself
    <root>/<model id>/run.json            what a model was made from
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rlkit.engine.files import locked, read_json, write_json

MODEL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}:train:[0-9]{1,9}")


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


class Records:
    """The sessions and training runs below a root folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def add_session(self, session: SessionRecord) -> None:
        """Write down a session."""
        with locked(self._root, fcntl.LOCK_SH):
            write_json(self._root / ".sessions" / f"{session.session_id}.json", asdict(session))

    def sessions(self) -> list[SessionRecord]:
        """The sessions that there ever were, newest first."""
        files = (self._root / ".sessions").glob("*.json")
        found = [SessionRecord(**raw) for file in files if (raw := read_json(file))]
        return sorted(found, key=lambda session: (-session.created, session.session_id))

    def add_run(self, run: Run) -> None:
        """Write down a training run."""
        with locked(self._root, fcntl.LOCK_SH):
            write_json(self.folder(run.model_id) / "run.json", asdict(run))

    def runs(self, model_id: str | None = None) -> list[Run]:
        """The training runs, newest first; only that of `model_id` if it is given."""
        if model_id is not None and not MODEL_ID.fullmatch(model_id):
            return []
        files = [folder / "run.json" for folder in self.folders(model_id)]
        found = [Run(**raw) for file in files if (raw := read_json(file))]
        return sorted(found, key=lambda run: (-run.created, run.model_id))

    def folder(self, model_id: str) -> Path:
        """The folder of a training run, which is a `MODEL_ID`."""
        return self._root / model_id.replace(":", "_")

    def folders(self, model_id: str | None = None) -> Iterator[Path]:
        """The folders of training runs that are there, of `model_id` or all."""
        pattern = "*_train_*" if model_id is None else self.folder(model_id).name
        return (folder for folder in self._root.glob(pattern) if folder.is_dir() and not folder.is_symlink())

    def sweep(self) -> None:
        """Remove what a killed server left half-written; the caller holds the root's lock exclusively."""
        for folder in (*self.folders(), self._root / ".sessions"):
            for file in folder.glob(".*.tmp"):
                file.unlink()


def strings(metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    """Metadata as the SDK reads it back: it sends any values and accepts strings only."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}
