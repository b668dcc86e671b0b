"""Checkpoints, snapshots and promises."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlkit.engine import checkpoints as checkpoints_module
from rlkit.engine import promises as promises_module
from rlkit.engine import snapshots as snapshots_module
from rlkit.engine.checkpoints import CheckpointInfo, CheckpointStore
from rlkit.engine.config import ModelConfig, read_config
from rlkit.engine.lora import Adapter, LoraSettings, new_adapter
from rlkit.engine.promises import Promises, json_answer
from rlkit.engine.snapshots import Snapshots
from rlkit.errors import MissingError, UsageError

from .tiny_models import write_model

MODEL = "abc:train:0"
INFO = CheckpointInfo("llama", LoraSettings(2), 3)


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return read_config(write_model(tmp_path / "m"))


@pytest.fixture
def adapter(config: ModelConfig) -> Adapter:
    return new_adapter(config, LoraSettings(2), seed=0)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "root")


def test_what_is_saved_is_loaded(store: CheckpointStore, config: ModelConfig, adapter: Adapter) -> None:
    moments = torch.rand(2, len(adapter.flat))
    path = store.save(MODEL, "weights", "a", INFO, adapter, moments=moments)
    assert path == "tinker://abc:train:0/weights/a"
    assert store.info(path) == INFO
    loaded, again = store.load(path, config, trainable=True)
    assert torch.equal(loaded.flat, adapter.flat)
    assert again is not None
    assert torch.equal(again, moments)
    assert store.paths(MODEL) == [path]
    store.delete(path)
    with pytest.raises(MissingError, match="no such checkpoint"):
        store.info(path)


def test_a_name_is_taken_unless_it_may_be_overwritten(store: CheckpointStore, adapter: Adapter) -> None:
    path = store.save(MODEL, "weights", "a", INFO, adapter)
    with pytest.raises(UsageError, match="exists already"):
        store.save(MODEL, "weights", "a", INFO, adapter)
    store.save(MODEL, "weights", "a", replace(INFO, steps=9), adapter, overwrite=True)
    assert store.info(path).steps == 9


def test_a_save_that_fails_leaves_the_old_checkpoint_and_no_rubbish(
    store: CheckpointStore, adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.save(MODEL, "weights", "a", INFO, adapter)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoints_module, "write_tensors", full)
    with pytest.raises(OSError, match="no space"):
        store.save(MODEL, "weights", "a", replace(INFO, steps=9), adapter, overwrite=True)
    assert store.info(path).steps == 3
    assert [p.name for p in (tmp_path / "root" / "abc_train_0" / "weights").iterdir()] == ["a"]


@pytest.mark.parametrize(
    "path", ["x", "tinker://../weights/a", "tinker://a:train:0/weights/..", "tinker://a:train:0/other/a", "/etc/passwd"]
)
def test_a_path_that_is_no_checkpoint_is_refused(store: CheckpointStore, path: str) -> None:
    with pytest.raises(UsageError, match="is not a checkpoint path"):
        store.info(path)


def test_a_checkpoint_of_another_model_is_refused(store: CheckpointStore, adapter: Adapter, tmp_path: Path) -> None:
    path = store.save(MODEL, "weights", "a", INFO, adapter)
    other = read_config(write_model(tmp_path / "other", hidden=32))
    with pytest.raises(UsageError, match="does not fit"):
        store.load(path, other, trainable=False)


def test_old_snapshots_wait_on_disk(config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots_module, "_MEMORY_BYTES_MAX", 1)
    snapshots = Snapshots(tmp_path / "scratch")
    made = [new_adapter(config, LoraSettings(2), seed=i).snapshot() for i in range(3)]
    for i, adapter in enumerate(made):
        snapshots.put(f"s:{i}", adapter)
    assert len(list((tmp_path / "scratch").iterdir())) == 2
    for i, adapter in enumerate(made):
        kept = snapshots.get(f"s:{i}")
        assert kept is not None
        assert torch.equal(kept.flat, adapter.flat)
    snapshots.drop("s:")
    assert snapshots.get("s:0") is None
    snapshots.close()
    assert not (tmp_path / "scratch").exists()


def test_an_answer_is_given_again_and_only_delivered_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises_module, "_DELIVERED_BYTES_MAX", 10)
    promises = Promises()
    first, new = promises.make("a")
    assert new
    assert promises.make("a") == (first, False)

    async def ask() -> None:
        assert await first.wait(0.01) is None
        first.resolve(json_answer({"n": 1}))
        first.fail("too late", "server")
        answer = await first.wait(1)
        assert answer is not None
        assert answer.body == b'{"n": 1}'

    asyncio.run(ask())
    promises.make("b")
    promises.delivered(first, 8)
    assert promises.get("a") is first
    for name in ("c", "d"):
        promises.delivered(promises.make(name)[0], 8)
    assert promises.get("a") is None
    assert promises.get("b") is not None


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, rlkit.engine; print([m for m in ('torch', 'tinker', 'starlette') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
