"""Sampler weights that have no name: what `save_weights_and_get_sampling_client` makes.

Invariant: a snapshot never changes. Those that were used last stay in memory; others wait on disk, because a long run
makes thousands and a client never says that it is done with one; of these the ones that were not used for longest go
when they would fill it, and one for which there is no room is refused rather than an older one lost. They wait in a
folder that the server holds locked: one that nobody holds was left by a killed server.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from rlkit.engine.model.config import ModelConfig
from rlkit.engine.model.lora import Adapter, LoraSettings
from rlkit.engine.storage.files import lock, locked, read_tensors, write_tensors
from rlkit.errors import UsageError

_MEMORY_BYTES_MAX = 256 << 20
_DISK_BYTES_MAX = 4 << 30
_PREFIX = ".scratch-"


@dataclass(frozen=True, slots=True, eq=False)
class _Spilled:
    config: ModelConfig
    settings: LoraSettings
    path: Path
    size_bytes: int


class Snapshots:
    """Frozen adapters by id, spilled to `folder`, which is a `scratch_folder` and goes with `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None
        self._recent: OrderedDict[str, Adapter] = OrderedDict()
        self._spilled: OrderedDict[str, _Spilled] = OrderedDict()

    def put(self, key: str, adapter: Adapter) -> None:
        """Keep a frozen adapter under a new key; `UsageError` where an older one cannot be written to disk."""
        while self._recent and sum(map(_bytes, (adapter, *self._recent.values()))) > _MEMORY_BYTES_MAX:
            oldest = next(iter(self._recent))
            self._spill(oldest, self._recent[oldest])
            del self._recent[oldest]
        self._recent[key] = adapter

    def use(self, key: str) -> None:
        """Note that a snapshot is sampled from, if it is there: those that are not go first."""
        for kept in (self._recent, self._spilled):
            if key in kept:
                kept.move_to_end(key)

    def get(self, key: str) -> Adapter | None:
        """The adapter of `key`, or None if its session has ended or others took its place."""
        self.use(key)
        if key in self._recent:
            return self._recent[key]
        if key not in self._spilled:
            return None
        spilled = self._spilled[key]
        return Adapter(spilled.config, spilled.settings, read_tensors(spilled.path)["flat"])

    def remove(self, key: str) -> None:
        """Forget one snapshot."""
        self._recent.pop(key, None)
        if (spilled := self._spilled.pop(key, None)) is not None:
            spilled.path.unlink(missing_ok=True)

    def drop(self, prefix: str) -> None:
        """Forget every snapshot whose key starts with `prefix`."""
        for key in [key for key in (*self._recent, *self._spilled) if key.startswith(prefix)]:
            self.remove(key)

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
        spilled = _Spilled(
            adapter.config, adapter.settings, self._folder / f"{key.replace(':', '_')}.safetensors", _bytes(adapter)
        )
        try:
            write_tensors(spilled.path, {"flat": adapter.flat})
        except (OSError, SafetensorError) as error:
            spilled.path.unlink(missing_ok=True)
            raise UsageError(
                f"{self._folder.parent}: no room for more sampler weights ({error}); free some, or end sessions"
            ) from error
        self._spilled[key] = spilled
        while len(self._spilled) > 1 and sum(s.size_bytes for s in self._spilled.values()) > _DISK_BYTES_MAX:
            self.remove(next(iter(self._spilled)))


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
