"""Retention of unnamed sampler weights."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rlkit.engine.model.config import ModelConfig, read_config
from rlkit.engine.model.lora import LoraSettings, make_adapter
from rlkit.engine.storage import snapshots as snapshots_module
from rlkit.engine.storage.snapshots import Snapshots, scratch_folder
from rlkit.errors import UsageError


@pytest.fixture
def config(models: Mapping[str, Path]) -> ModelConfig:
    return read_config(models["llama"])


def test_small_snapshots_are_not_counted_as_large_ones(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (make_adapter(config, LoraSettings(rank), seed=0).snapshot() for rank in (1, 64))
    large_bytes = large.flat.numel() * 4
    monkeypatch.setattr(snapshots_module, "_MEMORY_BYTES_MAX", 1)
    monkeypatch.setattr(snapshots_module, "_DISK_BYTES_MAX", 3 * large_bytes)
    folder = scratch_folder(tmp_path)
    snapshots = Snapshots(folder)
    for i in range(20):
        snapshots.put(f"small:{i}", small)
    for i in range(3):
        snapshots.put(f"large:{i}", large)
    assert [snapshots.get(f"small:{i}") is not None for i in range(20)] == [True] * 20
    for i in range(3, 10):
        snapshots.put(f"large:{i}", large)
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= 3.1 * large_bytes
    assert snapshots.get("small:19") is None
    assert snapshots.get("large:8") is not None
    snapshots.close()


def test_a_used_snapshot_outlives_unused_ones(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(config, LoraSettings(2), seed=0).snapshot()
    monkeypatch.setattr(snapshots_module, "_MEMORY_BYTES_MAX", 1)
    monkeypatch.setattr(snapshots_module, "_DISK_BYTES_MAX", 3 * adapter.flat.numel() * 4)
    snapshots = Snapshots(scratch_folder(tmp_path))
    snapshots.put("reference", adapter)
    for i in range(9):
        snapshots.put(f"step:{i}", adapter)
        assert snapshots.get("reference") is not None
    assert [i for i in range(9) if snapshots.get(f"step:{i}") is not None] == [6, 7, 8]
    snapshots.close()


def test_a_full_disk_rejects_a_new_snapshot_and_keeps_old_ones(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Mapping[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = scratch_folder(tmp_path)
    snapshots = Snapshots(folder)
    adapters = [make_adapter(config, LoraSettings(2), seed=i).snapshot() for i in range(2)]
    monkeypatch.setattr(snapshots_module, "_MEMORY_BYTES_MAX", 1)
    snapshots.put("s:0", adapters[0])
    with monkeypatch.context() as patch:
        patch.setattr(snapshots_module, "save_file", fail)
        with pytest.raises(UsageError, match="no disk space"):
            snapshots.put("s:1", adapters[1])
    assert list(folder.glob("*.safetensors")) == []
    assert snapshots.get("s:1") is None
    stored = snapshots.get("s:0")
    assert stored is not None
    assert torch.equal(stored.flat, adapters[0].flat)
    snapshots.put("s:2", adapters[1])
    assert snapshots.get("s:0") is not None
    snapshots.close()


def test_removing_a_snapshot_keeps_others_with_its_name_as_prefix(config: ModelConfig, tmp_path: Path) -> None:
    snapshots = Snapshots(scratch_folder(tmp_path))
    for key in ("s:sample:1", "s:sample:10"):
        snapshots.put(key, make_adapter(config, LoraSettings(1), seed=0).snapshot())
    snapshots.remove("s:sample:1")
    assert snapshots.get("s:sample:1") is None
    assert snapshots.get("s:sample:10") is not None
    snapshots.remove_prefix("s:")
    assert snapshots.get("s:sample:10") is None
