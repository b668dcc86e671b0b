"""Checkpoints on disk: saved weights and training states.

Invariant: a checkpoint exists only when it is complete: its `checkpoint.json` is written last, by a rename. Names from
clients cannot lead outside the root.

    <root>/<model id>/weights/<name>/            tinker://<model id>/weights/<name>: adapter, Adam's moments, step
    <root>/<model id>/sampler_weights/<name>/    tinker://<model id>/sampler_weights/<name>: adapter only
    <root>/<model id>/external_weights/<name>/   tinker://<model id>/external_weights/<name>: adapter as `peft` reads it

A checkpoint's folder has `checkpoint.json` and a data folder named in it, with `tensors.safetensors` (each LoRA matrix
by name; `adam.mean` and `adam.square`, flat) or the files of a PEFT adapter. The root also has the records of
`session_records.py` and the scratch folders of `snapshots.py`.

Several servers may share a root. A server that reads or writes tensors holds the root's lock shared; a server that
changes or removes a checkpoint holds it exclusively. A killed process releases its lock. While the lock is free, files
that no `checkpoint.json` names were left by killed servers.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType] their PathLike is bare
from torch import Tensor

from rlkit._util.files import sync_folder
from rlkit.engine.model.config import ModelConfig
from rlkit.engine.model.lora import Adapter, LoraSettings, parameter_slots
from rlkit.engine.storage.files import hold_lock, write_json
from rlkit.engine.storage.session_records import MODEL_ID, Records, Run, SessionRecord
from rlkit.engine.storage.snapshots import sweep_scratch
from rlkit.errors import MissingError, UsageError

FORMAT = 3
TTL_S = (3600, 10 * 365 * 24 * 3600)  # minimum and maximum life of a checkpoint that expires, in seconds

type Kind = Literal["weights", "sampler_weights", "external_weights"]

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
_PATH = re.compile(rf"tinker://({MODEL_ID.pattern})/({'|'.join(_KINDS)})/({_NAME.pattern})")
_DATA = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Base model, adapter settings and number of training steps of a checkpoint."""

    base_model: str
    settings: LoraSettings
    steps: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Metadata of a checkpoint; times are seconds since 1970."""

    path: str
    info: CheckpointInfo
    created: float
    expires: float | None
    public: bool
    user_metadata: Mapping[str, str] | None
    data: Path
    size_bytes: int = 0

    @property
    def id(self) -> str:
        """`<kind>/<name>`, unique in its run."""
        return "/".join(self.path.split("/")[3:])

    @property
    def kind(self) -> str:
        """`weights`, `sampler_weights` or `external_weights`."""
        return self.path.split("/")[3]


_CHECKPOINT = TypeAdapter(Checkpoint)


class CheckpointStore:
    """The checkpoints below a root folder, and the `records` of their runs; `clock` counts seconds since 1970."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self.clock = clock
        self.records = Records(root)

    def save(
        self,
        model_id: str,
        kind: Kind,
        name: str,
        info: CheckpointInfo,
        write: Callable[[Path], None],
        *,
        overwrite: bool = False,
        ttl_s: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Save the files that `write` puts into a folder as a checkpoint, and return its tinker:// path.

        The name must be free unless `overwrite` is set.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"checkpoint name {name!r}: use up to 128 letters, digits, '.', '_' and '-', not starting with '.'"
            )
        checkpoint = self._new_checkpoint(f"tinker://{model_id}/{kind}/{name}", info, ttl_s, user_metadata)
        self._sweep(model_id)
        with hold_lock(self._root, fcntl.LOCK_SH):
            if not overwrite and (checkpoint.data.parent / "checkpoint.json").exists():
                raise UsageError(f"{checkpoint.path} already exists: choose another name or set overwrite")
            self._commit(checkpoint, write)
        self._sweep(model_id)
        return checkpoint.path

    def copy(self, path: str, session_id: str, *, model_seq_id: int = 0, ttl_s: int | None = None) -> str:
        """Copy a checkpoint into a new run, with hard links, and return the copy's tinker:// path.

        Repeating a copy changes nothing, because a client resends a request that got no reply.
        """
        model_id = f"{session_id}:train:{model_seq_id}"
        with hold_lock(self._root, fcntl.LOCK_SH):
            source = self.get(path)
            copy = self._new_checkpoint(f"tinker://{model_id}/{source.id}", source.info, ttl_s, source.user_metadata)
            if not (copy.data.parent / "checkpoint.json").exists():
                self._commit(copy, lambda data: _link_files(source.data, data))
        self.records.add_session(SessionRecord(session_id, copy.created))
        self.records.add_run(Run(model_id, source.info.base_model, source.info.settings.rank, copy.created))
        return copy.path

    def get(self, path: str) -> Checkpoint:
        """Return the metadata of the checkpoint at a tinker:// path.

        Raises:
            UsageError: the path is malformed or the checkpoint has another format.
            MissingError: there is no such checkpoint, or it has expired.
        """
        file = self._folder(path) / "checkpoint.json"
        try:
            checkpoint = _decode(path, file)
        except (FileNotFoundError, NotADirectoryError):
            raise MissingError(f"{path}: no such checkpoint in {self._root}; it may have been deleted") from None
        if self._is_expired(checkpoint):
            raise MissingError(f"{path}: this checkpoint has expired (ttl_seconds)")
        return checkpoint

    def load(self, path: str, config: ModelConfig) -> tuple[Adapter, Tensor | None]:
        """Return the adapter, and Adam's moments [2, P] if they were saved; errors are those of `get`."""
        with hold_lock(self._root, fcntl.LOCK_SH):
            checkpoint = self.get(path)
            if checkpoint.kind == "external_weights":
                raise UsageError(f"{path}: external weights can only be downloaded; load a checkpoint of save_state")
            tensors = load_file(checkpoint.data / "tensors.safetensors")
        settings = checkpoint.info.settings
        flat = _flatten(path, tensors, config, settings)
        mean, square = tensors.get("adam.mean"), tensors.get("adam.square")
        moments = None if mean is None or square is None else torch.stack([mean, square])
        return Adapter(config, settings, flat), moments

    def checkpoints(self, owner: str | None = None) -> list[Checkpoint]:
        """Return the readable checkpoints of a model, of a session or, without `owner`, of all, newest first."""
        self._sweep(owner)
        checkpoints = [
            checkpoint
            for folder in self._folders(owner)
            if (checkpoint := self._read(folder)) and not self._is_expired(checkpoint)
        ]
        return sorted(checkpoints, key=lambda checkpoint: (-checkpoint.created, checkpoint.path))

    def delete(self, path: str) -> None:
        """Remove a checkpoint; errors are those of `get`."""
        with hold_lock(self._root, fcntl.LOCK_EX):
            _remove(self.get(path))

    def set_ttl(self, path: str, ttl_s: int | None) -> None:
        """Let a checkpoint expire `ttl_s` seconds from now, or never; errors are those of `get`."""
        expires = self._expiry(ttl_s)
        self._update(path, lambda checkpoint: replace(checkpoint, expires=expires))

    def set_public(self, path: str, public: bool) -> None:
        """Mark a checkpoint as public or private; errors are those of `get`."""
        self._update(path, lambda checkpoint: replace(checkpoint, public=public))

    def sweep(self) -> None:
        """Remove expired checkpoints, old records and files left by killed servers; called when a server starts.

        Does nothing while another server on this root reads or writes.
        """
        self._sweep(None)
        with suppress(BlockingIOError), hold_lock(self._root, fcntl.LOCK_EX | fcntl.LOCK_NB):
            self.records.sweep(self.clock())
            sweep_scratch(self._root)

    def _sweep(self, owner: str | None) -> None:
        """Remove expired and partial checkpoints of a model, of a session or of all, unless the root is locked."""
        with suppress(BlockingIOError), hold_lock(self._root, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for folder in self._folders(owner):
                self._sweep_folder(folder)

    def _sweep_folder(self, folder: Path) -> None:
        if not (folder / "checkpoint.json").exists():
            shutil.rmtree(folder)
        elif checkpoint := self._read(folder):
            if self._is_expired(checkpoint):
                _remove(checkpoint)
                return
            for entry in folder.iterdir():
                if entry.is_dir() and entry != checkpoint.data:
                    shutil.rmtree(entry)
                elif entry.name.endswith(".tmp"):
                    entry.unlink()

    def _new_checkpoint(
        self, path: str, info: CheckpointInfo, ttl_s: int | None, user_metadata: Mapping[str, str] | None
    ) -> Checkpoint:
        data = self._folder(path) / secrets.token_hex(8)
        return Checkpoint(path, info, self.clock(), self._expiry(ttl_s), False, user_metadata, data)

    def _commit(self, checkpoint: Checkpoint, write: Callable[[Path], None]) -> None:
        data, folder = checkpoint.data, checkpoint.data.parent
        data.mkdir(parents=True)
        try:
            write(data)
            files = list(data.iterdir())
            for file in files:
                with file.open("rb") as content:
                    os.fsync(content.fileno())
            sync_folder(data)
            size_bytes = sum(file.stat().st_size for file in files)
            write_json(folder / "checkpoint.json", _encode(replace(checkpoint, size_bytes=size_bytes)))
        except BaseException:
            shutil.rmtree(data, ignore_errors=True)
            if not any(folder.iterdir()):
                folder.rmdir()
            raise
        sync_folder(folder.parent)

    def _update(self, path: str, change: Callable[[Checkpoint], Checkpoint]) -> None:
        with hold_lock(self._root, fcntl.LOCK_EX):
            write_json(self._folder(path) / "checkpoint.json", _encode(change(self.get(path))))

    def _expiry(self, ttl_s: int | None) -> float | None:
        if ttl_s is None:
            return None
        if not TTL_S[0] <= ttl_s <= TTL_S[1]:
            raise UsageError(f"ttl_seconds must be {TTL_S[0]} (an hour) … {TTL_S[1]} (ten years), not {ttl_s}")
        return self.clock() + ttl_s

    def _is_expired(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.expires is not None and checkpoint.expires <= self.clock()

    def _read(self, folder: Path) -> Checkpoint | None:
        try:
            return _decode(_path_of(folder), folder / "checkpoint.json")
        except (OSError, UsageError):
            return None

    def _folder(self, path: str) -> Path:
        match = _PATH.fullmatch(path)
        if match is None:
            raise UsageError(f"{path!r} is not a checkpoint path; expected tinker://<model id>/weights/<name>")
        folder = self.records.folder(match[1]) / match[2] / match[3]
        if any(part.is_symlink() for part in (folder, *folder.parents[:2])):
            raise MissingError(f"{path}: no such checkpoint in {self._root}: links are not followed")
        return folder

    def _folders(self, owner: str | None) -> Iterator[Path]:
        for run in self.records.folders(owner):
            kinds = [run / kind for kind in _KINDS if not (run / kind).is_symlink()]
            for folder in [folder for kind in kinds for folder in kind.glob("*")]:
                if _PATH.fullmatch(_path_of(folder)) and not folder.is_symlink():
                    yield folder


def write_adapter(adapter: Adapter, moments: Tensor | None = None) -> Callable[[Path], None]:
    """Return a function that writes an adapter, and Adam's moments [2, P] if given, to a checkpoint's folder."""
    tensors = {key: view.detach().contiguous() for key, view in adapter.views.items()}
    if moments is not None:
        tensors |= {"adam.mean": moments[0].contiguous(), "adam.square": moments[1].contiguous()}
    return lambda folder: save_file(tensors, folder / "tensors.safetensors")


def _path_of(folder: Path) -> str:
    session_id, _, seq_id = folder.parts[-3].rpartition("_train_")
    return f"tinker://{session_id}:train:{seq_id}/{folder.parts[-2]}/{folder.name}"


def _encode(checkpoint: Checkpoint) -> dict[str, object]:
    fields = {key: value for key, value in asdict(checkpoint).items() if key != "path"}
    return {**fields, "format": FORMAT, "data": checkpoint.data.name}


def _decode(path: str, file: Path) -> Checkpoint:
    """Read a `checkpoint.json`; `UsageError` if it does not have exactly the content that `_encode` writes."""
    text = file.read_text(encoding="utf-8")
    try:
        raw: dict[str, object] = json.loads(text)
        checkpoint = _CHECKPOINT.validate_python({**raw, "path": path, "data": file.parent / str(raw["data"])})
        if not _DATA.fullmatch(checkpoint.data.name) or _encode(checkpoint) != raw:
            raise ValueError(FORMAT)
        return checkpoint
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"{file}: damaged, or written by another version of rlkit (this version reads format {FORMAT})"
        ) from None


def _remove(checkpoint: Checkpoint) -> None:
    (checkpoint.data.parent / "checkpoint.json").unlink()
    shutil.rmtree(checkpoint.data.parent)


def _link_files(source: Path, target: Path) -> None:
    for file in source.iterdir():
        try:
            os.link(file, target / file.name)
        except OSError:  # not every file system has hard links
            shutil.copyfile(file, target / file.name)


def _flatten(path: str, tensors: Mapping[str, Tensor], config: ModelConfig, settings: LoraSettings) -> Tensor:
    matrices: list[Tensor] = []
    for name, _, shape in parameter_slots(config, settings):
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise UsageError(f"{path}: the saved adapter does not fit the base model ({name} should be {shape})")
        matrices.append(tensors[name].flatten())
    return torch.cat(matrices)
