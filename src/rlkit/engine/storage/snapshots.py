"""Snapshots: unnamed sampler weights, made by `save_weights_and_get_sampling_client`.

Invariant: a snapshot never changes. The most recently used snapshots are in memory and the others on disk, because a
long run makes thousands and clients never release them. Above a limit on disk the least recently used are removed. If a
snapshot cannot be written, `put` raises an error and keeps all others. The server keeps its folder locked; an unlocked
folder was left by a killed server.
"""

from __future__ import annotations

import fcntl
import secrets
import shutil
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType] their PathLike is bare

from rlkit.engine.model.config import ModelConfig
from rlkit.engine.model.lora import Adapter, LoraSettings
from rlkit.engine.storage.files import hold_lock
from rlkit.errors import UsageError

_MEMORY_BYTES_MAX = 256 << 20
_DISK_BYTES_MAX = 4 << 30
_PREFIX = ".scratch-"


@dataclass(frozen=True, slots=True, eq=False)
class _SpilledSnapshot:
    config: ModelConfig
    settings: LoraSettings
    path: Path
    size_bytes: int


class Snapshots:
    """Frozen adapters by id, spilled to `folder`, a `scratch_folder` that `close` removes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: ExitStack | None = None
        self._recent: OrderedDict[str, Adapter] = OrderedDict()
        self._spilled: OrderedDict[str, _SpilledSnapshot] = OrderedDict()

    def put(self, key: str, adapter: Adapter) -> None:
        """Store a frozen adapter under a new key; `UsageError` if an older snapshot cannot be written to disk."""
        while self._recent and sum(map(_size_bytes, (adapter, *self._recent.values()))) > _MEMORY_BYTES_MAX:
            oldest = next(iter(self._recent))
            self._spill(oldest, self._recent[oldest])
            del self._recent[oldest]
        self._recent[key] = adapter

    def touch(self, key: str) -> None:
        """Mark a snapshot, if it exists, as the most recently used."""
        for snapshots in (self._recent, self._spilled):
            if key in snapshots:
                snapshots.move_to_end(key)

    def get(self, key: str) -> Adapter | None:
        """Return the adapter of `key`; None if its session has ended or newer snapshots replaced it."""
        self.touch(key)
        if key in self._recent:
            return self._recent[key]
        if key not in self._spilled:
            return None
        spilled = self._spilled[key]
        return Adapter(spilled.config, spilled.settings, load_file(spilled.path)["flat"])

    def remove(self, key: str) -> None:
        """Remove a snapshot, if it exists."""
        self._recent.pop(key, None)
        if (spilled := self._spilled.pop(key, None)) is not None:
            spilled.path.unlink(missing_ok=True)

    def remove_prefix(self, prefix: str) -> None:
        """Remove every snapshot whose key starts with `prefix`."""
        for key in [key for key in (*self._recent, *self._spilled) if key.startswith(prefix)]:
            self.remove(key)

    def close(self) -> None:
        """Remove all snapshots and the folder."""
        self._recent.clear()
        self._spilled.clear()
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()
            self._lock = None

    def _spill(self, key: str, adapter: Adapter) -> None:
        if self._lock is None:
            lock = ExitStack()
            with hold_lock(self._folder.parent, fcntl.LOCK_SH):  # keeps sweeps from removing the still unlocked folder
                lock.enter_context(hold_lock(self._folder, fcntl.LOCK_EX))
            self._lock = lock
        path = self._folder / f"{key.replace(':', '_')}.safetensors"
        spilled = _SpilledSnapshot(adapter.config, adapter.settings, path, _size_bytes(adapter))
        try:
            save_file({"flat": adapter.flat}, spilled.path)
        except (OSError, SafetensorError) as error:
            spilled.path.unlink(missing_ok=True)
            raise UsageError(
                f"{self._folder.parent}: no disk space for more sampler weights ({error}); free space or end sessions"
            ) from error
        self._spilled[key] = spilled
        while len(self._spilled) > 1 and sum(s.size_bytes for s in self._spilled.values()) > _DISK_BYTES_MAX:
            self.remove(next(iter(self._spilled)))


def scratch_folder(root: Path) -> Path:
    """Return a new path for a server's snapshots; the folder is made at the first write."""
    return root / f"{_PREFIX}{secrets.token_hex(8)}"


def sweep_scratch(root: Path) -> None:
    """Remove the scratch folders of killed servers; the caller holds the root's lock exclusively."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            with hold_lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its server is running, or it is not a folder


def _size_bytes(adapter: Adapter) -> int:
    return adapter.flat.numel() * adapter.flat.element_size()
