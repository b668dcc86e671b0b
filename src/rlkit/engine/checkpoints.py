"""Saved weights, training states and the runs that they belong to, on disk.

Invariant: a checkpoint is there whole or not at all. It exists from the moment its `checkpoint.json` does, which is
written last and replaced by one rename; and no name a client gives can lead outside the root.

    <root>/.sessions/<session id>.json           what a client said of itself
    <root>/<model id>/run.json                   what the model was made from
    <root>/<model id>/weights/<name>/            tinker://<model id>/weights/<name>: adapter, Adam's moments, step
    <root>/<model id>/sampler_weights/<name>/    tinker://<model id>/sampler_weights/<name>: adapter only
    <root>/<model id>/external_weights/<name>/   tinker://<model id>/external_weights/<name>: adapter as `peft` reads it

A checkpoint's folder holds `checkpoint.json` and the folder that this names, with `tensors.safetensors` (each LoRA
matrix by name; `adam.mean` and `adam.square`, flat) or the files of a PEFT adapter.

Several servers may share a root. Who reads or writes tensors holds the root's lock shared, who changes or removes a
checkpoint holds it exclusively, and the lock of a killed process is free at once: what has no name in any
`checkpoint.json` while nobody holds the lock was left by a killed server.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlkit.engine.config import ModelConfig
from rlkit.engine.lora import ALPHA, Adapter, LoraSettings, slots
from rlkit.engine.tensorfile import read_tensors, write_tensors
from rlkit.errors import MissingError, UsageError

FORMAT = 2
TTL_S = (3600, 10 * 365 * 24 * 3600)
"""The shortest and the longest life of a checkpoint that has an end."""

type Kind = Literal["weights", "sampler_weights", "external_weights"]

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_MODEL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}:train:[0-9]{1,9}")
_KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
_PATH = re.compile(rf"tinker://({_MODEL_ID.pattern})/({'|'.join(_KINDS)})/({_NAME.pattern})")
_DATA = re.compile(r"[0-9a-f]{16}")
_RECIPIENTS_MAX = 10


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a checkpoint was trained from, and for how many steps."""

    base_model: str
    settings: LoraSettings
    steps: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that is known of a checkpoint without reading its tensors; times are seconds since 1970."""

    path: str
    info: CheckpointInfo
    created: float
    expires: float | None
    public: bool
    user_metadata: Mapping[str, str] | None
    data: Path
    size_bytes: int = 0

    @property
    def model_id(self) -> str:
        """The training run that it belongs to."""
        return self.path.split("/")[2]

    @property
    def id(self) -> str:
        """`<kind>/<name>`, unique in its run."""
        return "/".join(self.path.split("/")[3:])


@dataclass(frozen=True, slots=True)
class Session:
    """What a client said of itself when it opened a session."""

    session_id: str
    created: float
    user_metadata: Mapping[str, str] | None = None
    display_name: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A training run: a model that was made, or a copied checkpoint."""

    model_id: str
    base_model: str
    rank: int
    created: float
    user_metadata: Mapping[str, str] | None = None


class CheckpointStore:
    """The checkpoints and runs below a root folder.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self.clock = clock

    def save(
        self,
        model_id: str,
        kind: Literal["weights", "sampler_weights"],
        name: str,
        info: CheckpointInfo,
        adapter: Adapter,
        *,
        moments: Tensor | None = None,
        overwrite: bool = False,
        ttl_s: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Write a checkpoint and return its tinker:// path.

        Raises:
            UsageError: the name or the lifetime is not allowed, or the name is taken and `overwrite` is not set.
        """
        tensors = {key: view.detach().contiguous() for key, view in adapter.views.items()}
        if moments is not None:
            tensors |= {"adam.mean": moments[0].contiguous(), "adam.square": moments[1].contiguous()}
        _check_name(name)
        entry = self._entry(f"tinker://{model_id}/{kind}/{name}", info, ttl_s, user_metadata)
        self._write(entry, lambda data: write_tensors(data / "tensors.safetensors", tensors), overwrite=overwrite)
        return entry.path

    def save_external(
        self,
        model_id: str,
        name: str,
        info: CheckpointInfo,
        adapter: Adapter,
        *,
        ttl_s: int | None = None,
        recipients: Sequence[str] = (),
    ) -> str:
        """Write a PEFT adapter, which is for downloading only, and return its tinker:// path.

        The output layer is `lm_head`, as `peft` calls it. On a model whose embedding is tied to it, `peft` adapts the
        output alone, as training did; a merge into the one matrix could not.

        Args:
            recipients: `age` public keys; with any, each file is encrypted to them and gets the suffix `.age`.

        Raises:
            UsageError: as `save`; also where a key is none.
        """
        encrypt = _encryption(recipients)
        _check_name(name)
        entry = self._entry(f"tinker://{model_id}/external_weights/{name}", info, ttl_s, None)

        def fill(data: Path) -> None:
            for file, content in _peft_files(info, adapter):
                (data / f"{file}.age").write_bytes(encrypt(content)) if encrypt else (data / file).write_bytes(content)

        self._write(entry, fill, overwrite=False)
        return entry.path

    def copy(self, path: str, session_id: str, *, model_seq_id: int = 0, ttl_s: int | None = None) -> str:
        """Copy a checkpoint into a run of its own, sharing the files; the copy's tinker:// path.

        The same copy made again is the same: a client resends what it got no reply to.

        Raises:
            UsageError, MissingError: as `get`; also where the lifetime is not allowed.
        """
        model_id = f"{session_id}:train:{model_seq_id}"
        with self._lock(fcntl.LOCK_SH):
            source = self.get(path)
            copy = self._entry(f"tinker://{model_id}/{source.id}", source.info, ttl_s, source.user_metadata)
            if not (copy.data.parent / "checkpoint.json").exists():
                self._commit(copy, lambda data: _link(source.data, data))
        self.add_session(Session(session_id, copy.created))
        self.add_run(Run(model_id, source.info.base_model, source.info.settings.rank, copy.created))
        return copy.path

    def get(self, path: str) -> Checkpoint:
        """What is known of the checkpoint at a tinker:// path.

        Raises:
            UsageError: the path is malformed or the checkpoint is of another format.
            MissingError: there is no such checkpoint, or it has expired.
        """
        file = self._folder(path) / "checkpoint.json"
        try:
            checkpoint = _decode(path, file)
        except (FileNotFoundError, NotADirectoryError):
            raise MissingError(f"{path}: there is no such checkpoint in {self._root} (any more)") from None
        if self._expired(checkpoint):
            raise MissingError(f"{path}: this checkpoint has expired: its ttl_seconds are over")
        return checkpoint

    def info(self, path: str) -> CheckpointInfo:
        """What the checkpoint at a tinker:// path was trained from; raises as `get`."""
        return self.get(path).info

    def load(self, path: str, config: ModelConfig) -> tuple[Adapter, Tensor | None]:
        """The adapter, and Adam's moments [2, P] where they were saved.

        Raises:
            UsageError, MissingError: as `get`; also where the tensors do not fit the base model.
        """
        with self._lock(fcntl.LOCK_SH):
            checkpoint = self.get(path)
            if checkpoint.id.startswith("external_weights/"):
                raise UsageError(f"{path}: external weights are for downloading; load what save_state wrote")
            tensors = read_tensors(checkpoint.data / "tensors.safetensors")
        settings = checkpoint.info.settings
        flat = _flatten(path, tensors, config, settings)
        mean, square = tensors.get("adam.mean"), tensors.get("adam.square")
        moments = None if mean is None or square is None else torch.stack([mean, square])
        return Adapter(config, settings, flat), moments

    def checkpoints(self, model_id: str | None = None) -> list[Checkpoint]:
        """The checkpoints of a model or of all, newest first; those that this version cannot read are left out."""
        self.sweep(model_id)
        found = [c for folder in self._folders(model_id) if (c := self._read(folder)) and not self._expired(c)]
        return sorted(found, key=lambda checkpoint: (-checkpoint.created, checkpoint.path))

    def delete(self, path: str) -> None:
        """Remove a checkpoint; raises as `get`."""
        with self._lock(fcntl.LOCK_EX):
            _remove(self.get(path))

    def set_ttl(self, path: str, ttl_s: int | None) -> None:
        """Let a checkpoint expire in `ttl_s` seconds from now, or never.

        Raises:
            UsageError, MissingError: as `get`; also where the lifetime is not allowed.
        """
        self._amend(path, expires=self._expiry(ttl_s))

    def set_public(self, path: str, public: bool) -> None:
        """Note whether a checkpoint is published; raises as `get`."""
        self._amend(path, public=public)

    def add_session(self, session: Session) -> None:
        """Write down a session."""
        with self._lock(fcntl.LOCK_SH):
            _write_json(self._root / ".sessions" / f"{session.session_id}.json", asdict(session))

    def sessions(self) -> list[Session]:
        """The sessions that there ever were, newest first."""
        found = [Session(**raw) for file in (self._root / ".sessions").glob("*.json") if (raw := _read_json(file))]
        return sorted(found, key=lambda session: (-session.created, session.session_id))

    def add_run(self, run: Run) -> None:
        """Write down a training run."""
        with self._lock(fcntl.LOCK_SH):
            _write_json(self._run_folder(run.model_id) / "run.json", asdict(run))

    def runs(self, model_id: str | None = None) -> list[Run]:
        """The training runs, newest first; only that of `model_id` if it is given."""
        if model_id is not None and not _MODEL_ID.fullmatch(model_id):
            return []
        files = [folder / "run.json" for folder in self._run_folders(model_id)]
        found = [Run(**raw) for file in files if (raw := _read_json(file))]
        return sorted(found, key=lambda run: (-run.created, run.model_id))

    def sweep(self, model_id: str | None = None) -> None:
        """Remove what has expired and what a killed server left, of a model or of all.

        Nothing is done while any server on this root reads or writes: the next sweep will find it.
        """
        try:
            with self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
                for folder in self._folders(model_id):
                    self._sweep(folder)
                for folder in (*self._run_folders(), self._root / ".sessions"):
                    for file in folder.glob(".*.tmp"):
                        file.unlink()
        except BlockingIOError:
            pass

    def _sweep(self, folder: Path) -> None:
        if not (folder / "checkpoint.json").exists():
            shutil.rmtree(folder)
        elif checkpoint := self._read(folder):
            if self._expired(checkpoint):
                return _remove(checkpoint)
            for entry in folder.iterdir():
                if entry.is_dir() and entry != checkpoint.data:
                    shutil.rmtree(entry)
                elif entry.name.endswith(".tmp"):
                    entry.unlink()
        return None

    def _entry(
        self, path: str, info: CheckpointInfo, ttl_s: int | None, user_metadata: Mapping[str, str] | None
    ) -> Checkpoint:
        data = self._folder(path) / secrets.token_hex(8)
        return Checkpoint(path, info, self.clock(), self._expiry(ttl_s), False, user_metadata, data)

    def _write(self, entry: Checkpoint, fill: Callable[[Path], None], *, overwrite: bool) -> None:
        self.sweep(entry.model_id)
        with self._lock(fcntl.LOCK_SH):
            if not overwrite and (entry.data.parent / "checkpoint.json").exists():
                raise UsageError(f"{entry.path} exists already: choose another name or set overwrite")
            self._commit(entry, fill)
        self.sweep(entry.model_id)

    def _commit(self, entry: Checkpoint, fill: Callable[[Path], None]) -> None:
        folder = entry.data.parent
        entry.data.mkdir(parents=True)
        try:
            fill(entry.data)
            files = list(entry.data.iterdir())
            for file in (*files, entry.data):
                _sync(file)
            size_bytes = sum(file.stat().st_size for file in files)
            _write_json(folder / "checkpoint.json", _encode(replace(entry, size_bytes=size_bytes)))
        except BaseException:
            shutil.rmtree(entry.data, ignore_errors=True)
            if not any(folder.iterdir()):
                folder.rmdir()
            raise
        _sync(folder.parent)

    def _amend(self, path: str, **changes: Any) -> None:
        with self._lock(fcntl.LOCK_EX):
            _write_json(self._folder(path) / "checkpoint.json", _encode(replace(self.get(path), **changes)))

    def _expiry(self, ttl_s: int | None) -> float | None:
        if ttl_s is None:
            return None
        if not TTL_S[0] <= ttl_s <= TTL_S[1]:
            raise UsageError(f"ttl_seconds must be {TTL_S[0]} (an hour) … {TTL_S[1]} (ten years), not {ttl_s}")
        return self.clock() + ttl_s

    def _expired(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.expires is not None and checkpoint.expires <= self.clock()

    def _read(self, folder: Path) -> Checkpoint | None:
        try:
            return _decode(self._path(folder), folder / "checkpoint.json")
        except (OSError, UsageError):
            return None

    def _path(self, folder: Path) -> str:
        session_id, _, seq_id = folder.parts[-3].rpartition("_train_")
        return f"tinker://{session_id}:train:{seq_id}/{folder.parts[-2]}/{folder.name}"

    def _folder(self, path: str) -> Path:
        match = _PATH.fullmatch(path)
        if match is None:
            raise UsageError(f"{path!r} is not a checkpoint path: tinker://<model id>/weights/<name> is expected")
        folder = self._run_folder(match[1]) / match[2] / match[3]
        if any(part.is_symlink() for part in (folder, *folder.parents[:2])):
            raise MissingError(f"{path}: there is no such checkpoint in {self._root}: a link is not followed")
        return folder

    def _run_folder(self, model_id: str) -> Path:
        return self._root / model_id.replace(":", "_")

    def _run_folders(self, model_id: str | None = None) -> Iterator[Path]:
        pattern = "*_train_*" if model_id is None else self._run_folder(model_id).name
        return (folder for folder in self._root.glob(pattern) if folder.is_dir() and not folder.is_symlink())

    def _folders(self, model_id: str | None) -> Iterator[Path]:
        for run in list(self._run_folders(model_id)):
            kinds = [run / kind for kind in _KINDS]
            for folder in [folder for kind in kinds if not kind.is_symlink() for folder in list(kind.glob("*"))]:
                if _PATH.fullmatch(self._path(folder)) and not folder.is_symlink():
                    yield folder

    @contextmanager
    def _lock(self, mode: int) -> Generator[None]:
        self._root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, mode)
            yield
        finally:
            os.close(descriptor)


def strings(metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    """Metadata as the SDK reads it back: it sends any values and accepts strings only."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def _encode(checkpoint: Checkpoint) -> dict[str, object]:
    known = {key: value for key, value in asdict(checkpoint).items() if key != "path"}
    return {**known, "format": FORMAT, "data": checkpoint.data.name}


def _decode(path: str, file: Path) -> Checkpoint:
    """Read a `checkpoint.json`; where it says anything unexpected it is refused, never believed."""
    text = file.read_text(encoding="utf-8")
    try:
        raw: dict[str, Any] = json.loads(text)
        if raw.pop("format") != FORMAT or not _DATA.fullmatch(raw["data"]):
            raise ValueError(FORMAT)
        info = raw.pop("info")
        settings = LoraSettings(**info.pop("settings"))
        data = file.parent / raw.pop("data")
        return Checkpoint(path=path, info=CheckpointInfo(settings=settings, **info), data=data, **raw)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UsageError(
            f"{file}: damaged, or written by another version of rlkit (this reads format {FORMAT})"
        ) from None


def _remove(checkpoint: Checkpoint) -> None:
    (checkpoint.data.parent / "checkpoint.json").unlink()
    shutil.rmtree(checkpoint.data.parent)


def _link(source: Path, target: Path) -> None:
    for file in source.iterdir():
        try:
            os.link(file, target / file.name)
        except OSError:  # not every file system has hard links
            shutil.copyfile(file, target / file.name)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"checkpoint name {name!r}: use up to 128 letters, digits, '.', '_' and '-', not starting with '.'"
        )


def _flatten(path: str, tensors: Mapping[str, Tensor], config: ModelConfig, settings: LoraSettings) -> Tensor:
    parts: list[Tensor] = []
    for name, _, shape in slots(config, settings):
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise UsageError(f"{path}: the saved adapter does not fit the base model ({name} should be {shape})")
        parts.append(tensors[name].flatten())
    return torch.cat(parts)


_PEFT_MODULES = {
    "qkv": {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"},
    "o": {"o": "self_attn.o_proj"},
    "gate_up": {"gate": "mlp.gate_proj", "up": "mlp.up_proj"},
    "down": {"down": "mlp.down_proj"},
    "unembed": {"unembed": "lm_head"},
}


def _peft_files(info: CheckpointInfo, adapter: Adapter) -> Iterator[tuple[str, bytes]]:
    """The files of a PEFT adapter: matrices as `torch.nn.Linear` has them, A `[r, in]` and B `[out, r]`."""
    from safetensors.torch import save

    rank = info.settings.rank
    tensors: dict[str, Tensor] = {}
    for name in [name for name in adapter.views if name.endswith(".lora_A")]:
        stem, _, group = name.removesuffix(".lora_A").rpartition(".")
        for index, (part, module) in enumerate(_PEFT_MODULES[group].items()):
            a = adapter.views[name][:, index * rank : (index + 1) * rank]
            b = adapter.views[f"{stem}.{part}.lora_B" if stem else f"{part}.lora_B"]
            key = f"base_model.model.model.{stem}.{module}" if stem else f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = a.detach().t().contiguous()
            tensors[f"{key}.lora_B.weight"] = b.detach().t().contiguous()
    yield "adapter_model.safetensors", save(tensors, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": info.base_model,
        "r": rank,
        "lora_alpha": int(ALPHA),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    yield "adapter_config.json", json.dumps(config, indent=1).encode()


def _encryption(recipients: Sequence[str]) -> Callable[[bytes], bytes] | None:
    """What encrypts a file to `age` public keys, None without any."""
    if not recipients:
        return None
    if len(recipients) > _RECIPIENTS_MAX:
        raise UsageError(f"age_encryption_recipients: at most {_RECIPIENTS_MAX} keys, not {len(recipients)}")
    import pyrage

    library: Any = pyrage  # it has no type information
    try:
        keys = [
            (library.x25519 if key.startswith("age1") else library.ssh).Recipient.from_str(key) for key in recipients
        ]
    except library.RecipientError as error:
        raise UsageError(f"age_encryption_recipients: not an age or SSH public key ({error})") from None
    return lambda content: bytes(library.encrypt(content, keys))


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_json(file: Path, value: object) -> None:
    """Replace a file with one rename, flushed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
        _sync(temporary)
        temporary.replace(file)
        _sync(file.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
