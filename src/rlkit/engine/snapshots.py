"""Sampler weights that have no name: what `save_weights_and_get_sampling_client` makes.

Invariant: a snapshot never changes. The newest stay in memory; older ones wait on disk, because a long run makes
thousands and a client never says that it is done with one; the oldest go when they would fill it. They wait in a folder
that the server holds locked: one that nobody holds was left by a killed server.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections import OrderedDict
from pathlib import Path

from rlkit.engine.config import ModelConfig
from rlkit.engine.files import lock, locked
from rlkit.engine.lora import Adapter, LoraSettings
from rlkit.engine.tensorfile import read_tensors, write_tensors

_MEMORY_BYTES_MAX = 256 << 20
_DISK_BYTES_MAX = 4 << 30
_PREFIX = ".scratch-"


class Snapshots:
    """Frozen adapters by id, spilled to `folder`, which is a `scratch_folder` and goes with `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None
        self._recent: OrderedDict[str, Adapter] = OrderedDict()
        self._spilled: OrderedDict[str, tuple[ModelConfig, LoraSettings, Path]] = OrderedDict()

    def put(self, key: str, adapter: Adapter) -> None:
        """Keep a frozen adapter under a new key."""
        self._recent[key] = adapter
        while sum(_bytes(a) for a in self._recent.values()) > _MEMORY_BYTES_MAX and len(self._recent) > 1:
            self._spill(*self._recent.popitem(last=False))

    def get(self, key: str) -> Adapter | None:
        """The adapter of `key`, or None if its session has ended or newer ones took its place."""
        if key in self._recent:
            self._recent.move_to_end(key)
            return self._recent[key]
        if key not in self._spilled:
            return None
        config, settings, path = self._spilled[key]
        return Adapter(config, settings, read_tensors(path)["flat"])

    def drop(self, prefix: str) -> None:
        """Forget every snapshot whose key starts with `prefix`."""
        for key in [key for key in self._recent if key.startswith(prefix)]:
            del self._recent[key]
        for key in [key for key in self._spilled if key.startswith(prefix)]:
            self._spilled.pop(key)[2].unlink(missing_ok=True)

    def close(self) -> None:
        """Forget everything."""
        self._recent.clear()
        self._spilled.clear()
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def _spill(self, key: str, adapter: Adapter) -> None:
        if self._lock is None:
            with locked(self._folder.parent, fcntl.LOCK_SH):  # no sweep comes between its making and its lock
                self._lock = lock(self._folder, fcntl.LOCK_EX)
        path = self._folder / f"{len(self._spilled)}-{key.replace(':', '_')}.safetensors"
        write_tensors(path, {"flat": adapter.flat})
        self._spilled[key] = (adapter.config, adapter.settings, path)
        while len(self._spilled) > 1 and len(self._spilled) * _bytes(adapter) > _DISK_BYTES_MAX:
            self._spilled.popitem(last=False)[1][2].unlink(missing_ok=True)


def scratch_folder(root: Path) -> Path:
    """A folder for one server's snapshots; it is made when it is needed."""
    return root / f"{_PREFIX}{secrets.token_hex(8)}"


def sweep_scratch(root: Path) -> None:
    """Remove the scratch folders of servers that are dead; the caller holds the root's lock exclusively."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            with locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its server lives, or it is no folder


def _bytes(adapter: Adapter) -> int:
    return adapter.flat.numel() * adapter.flat.element_size()
