"""Saved weights and training states on disk.

Invariant: a checkpoint is there whole or not at all (it is written into a temporary folder, flushed and renamed), and
no name a client gives can lead outside the root.

    <root>/<model id>/weights/<name>/            tinker://<model id>/weights/<name>: adapter, Adam's moments, step
    <root>/<model id>/sampler_weights/<name>/    tinker://<model id>/sampler_weights/<name>: adapter only

A folder holds `tensors.safetensors` (each LoRA matrix by name; `adam.mean` and `adam.square`, flat) and
`checkpoint.json`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rlkit.engine.config import ModelConfig
from rlkit.engine.lora import Adapter, LoraSettings, slots
from rlkit.engine.tensorfile import read_tensors, write_tensors
from rlkit.errors import MissingError, UsageError

FORMAT = 1
type Kind = Literal["weights", "sampler_weights"]

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_MODEL_ID = re.compile(r"[A-Za-z0-9_-]+:train:[0-9]+")
_PATH = re.compile(rf"tinker://({_MODEL_ID.pattern})/(weights|sampler_weights)/({_NAME.pattern})")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What is known of a checkpoint without reading its tensors."""

    base_model: str
    settings: LoraSettings
    steps: int


class CheckpointStore:
    """The checkpoints below a root folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(
        self,
        model_id: str,
        kind: Kind,
        name: str,
        info: CheckpointInfo,
        adapter: Adapter,
        *,
        moments: Tensor | None = None,
        overwrite: bool = False,
    ) -> str:
        """Write a checkpoint and return its tinker:// path.

        Raises:
            UsageError: the name is not allowed, or taken and `overwrite` is not set.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"checkpoint name {name!r}: use up to 128 letters, digits, '.', '_' and '-', not starting with '.'"
            )
        path = f"tinker://{model_id}/{kind}/{name}"
        folder = self._folder(path)
        if folder.exists() and not overwrite:
            raise UsageError(f"{path} exists already: choose another name or set overwrite")
        tensors = {key: view.detach().contiguous() for key, view in adapter.views.items()}
        if moments is not None:
            tensors |= {"adam.mean": moments[0].contiguous(), "adam.square": moments[1].contiguous()}
        temporary = folder.with_name(f".{name}.{secrets.token_hex(4)}.tmp")
        temporary.mkdir(parents=True)
        try:
            write_tensors(temporary / "tensors.safetensors", tensors)
            (temporary / "checkpoint.json").write_text(json.dumps({"format": FORMAT, **asdict(info)}, indent=1))
            for file in (*temporary.iterdir(), temporary):
                _sync(file)
            _replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return path

    def info(self, path: str) -> CheckpointInfo:
        """What is known of the checkpoint at a tinker:// path.

        Raises:
            UsageError: the path is malformed or the checkpoint is of another format.
            MissingError: there is no such checkpoint.
        """
        file = self._folder(path) / "checkpoint.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MissingError(f"{path}: there is no such checkpoint in {self._root}") from None
        if raw.pop("format", None) != FORMAT:
            raise UsageError(f"{file}: written by another version of rlkit, this one reads format {FORMAT}")
        return CheckpointInfo(str(raw["base_model"]), LoraSettings(**raw["settings"]), int(raw["steps"]))

    def load(self, path: str, config: ModelConfig, *, trainable: bool) -> tuple[Adapter, Tensor | None]:
        """The adapter, and Adam's moments [2, P] where they were saved.

        Raises:
            UsageError, MissingError: as `info`; also where the tensors do not fit the base model.
        """
        settings = self.info(path).settings
        tensors = read_tensors(self._folder(path) / "tensors.safetensors")
        flat = _flatten(path, tensors, config, settings)
        mean, square = tensors.get("adam.mean"), tensors.get("adam.square")
        moments = None if mean is None or square is None else torch.stack([mean, square])
        return Adapter(config, settings, flat, trainable=trainable), moments

    def paths(self, model_id: str) -> list[str]:
        """The tinker:// paths of a model's checkpoints."""
        if not _MODEL_ID.fullmatch(model_id):
            return []
        base = self._root / _folder_name(model_id)
        return [
            f"tinker://{model_id}/{kind}/{folder.name}"
            for kind in ("weights", "sampler_weights")
            for folder in sorted((base / kind).glob("[!.]*/"))
        ]

    def delete(self, path: str) -> None:
        """Remove a checkpoint; raises as `info`."""
        self.info(path)
        shutil.rmtree(self._folder(path))

    def _folder(self, path: str) -> Path:
        match = _PATH.fullmatch(path)
        if match is None:
            raise UsageError(f"{path!r} is not a checkpoint path: tinker://<model id>/weights/<name> is expected")
        return self._root / _folder_name(match[1]) / match[2] / match[3]


def _flatten(path: str, tensors: Mapping[str, Tensor], config: ModelConfig, settings: LoraSettings) -> Tensor:
    parts: list[Tensor] = []
    for name, _, shape in slots(config, settings):
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise UsageError(f"{path}: the saved adapter does not fit the base model ({name} should be {shape})")
        parts.append(tensors[name].flatten())
    return torch.cat(parts)


def _folder_name(model_id: str) -> str:
    return model_id.replace(":", "_")


def _replace(temporary: Path, folder: Path) -> None:
    """Rename, with an old checkpoint of that name moved out of the way first: no folder can be renamed over another."""
    old = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.old")
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
