"""Checkpoints, snapshots and promises."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlkit.engine.model.config import ModelConfig, read_config
from rlkit.engine.model.lora import Adapter, LoraSettings, make_adapter
from rlkit.engine.server import futures as promises_module
from rlkit.engine.server.futures import Promises, json_answer
from rlkit.engine.server.request_order import new_id
from rlkit.engine.storage import checkpoints as checkpoints_module
from rlkit.engine.storage import snapshots as snapshots_module
from rlkit.engine.storage.checkpoints import CheckpointInfo, CheckpointStore, write_adapter
from rlkit.engine.storage.session_records import Records, Run, SessionRecord
from rlkit.engine.storage.snapshots import Snapshots
from rlkit.errors import MissingError, UsageError

from .tiny_models import write_model

MODEL = "abc:train:0"
INFO = CheckpointInfo("llama", LoraSettings(2), 3)


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return read_config(write_model(tmp_path / "m"))


@pytest.fixture
def adapter(config: ModelConfig) -> Adapter:
    return make_adapter(config, LoraSettings(2), seed=0)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "root")


def test_a_checkpoint_round_trips(store: CheckpointStore, config: ModelConfig, adapter: Adapter) -> None:
    moments = torch.rand(2, len(adapter.flat))
    path = store.save(MODEL, "weights", "a", INFO, write_adapter(adapter, moments))
    assert path == "tinker://abc:train:0/weights/a"
    assert store.get(path).info == INFO
    loaded, again = store.load(path, config)
    assert torch.equal(loaded.flat, adapter.flat)
    assert again is not None
    assert torch.equal(again, moments)
    assert [checkpoint.path for checkpoint in store.checkpoints()] == [path]
    store.delete(path)
    assert store.checkpoints() == []
    with pytest.raises(MissingError, match="no such checkpoint"):
        store.get(path)


def test_a_name_is_taken_unless_it_may_be_overwritten(store: CheckpointStore, adapter: Adapter) -> None:
    path = store.save(MODEL, "weights", "a", INFO, write_adapter(adapter))
    with pytest.raises(UsageError, match="already exists"):
        store.save(MODEL, "weights", "a", INFO, write_adapter(adapter))
    store.save(MODEL, "weights", "a", replace(INFO, steps=9), write_adapter(adapter), overwrite=True)
    assert store.get(path).info.steps == 9


def test_a_failed_save_leaves_only_the_old_checkpoint(
    store: CheckpointStore, adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.save(MODEL, "weights", "a", INFO, write_adapter(adapter))

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoints_module, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        store.save(MODEL, "weights", "a", replace(INFO, steps=9), write_adapter(adapter), overwrite=True)
    assert store.get(path).info.steps == 3
    assert [p.name for p in (tmp_path / "root" / "abc_train_0" / "weights").iterdir()] == ["a"]


@pytest.mark.parametrize(
    "path",
    [
        "x",
        "/etc/passwd",
        "tinker://../weights/a",
        "tinker://a:train:0/weights/..",
        "tinker://a:train:0/other/a",
        "tinker://a:train:0/weights/a\x00",
        "tinker://a:train:0/weights/a\n",
        "tinker://a:train:0/weights/%2e%2e",
        f"tinker://{'a' * 300}:train:0/weights/a",
        f"tinker://a:train:0/weights/{'a' * 300}",
    ],
)
def test_a_path_without_a_checkpoint_is_rejected(store: CheckpointStore, path: str) -> None:
    with pytest.raises(UsageError, match="is not a checkpoint path"):
        store.get(path)


def test_a_checkpoint_of_another_model_is_rejected(store: CheckpointStore, adapter: Adapter, tmp_path: Path) -> None:
    path = store.save(MODEL, "weights", "a", INFO, write_adapter(adapter))
    other = read_config(write_model(tmp_path / "other", hidden=32))
    with pytest.raises(UsageError, match="does not fit"):
        store.load(path, other)


@pytest.mark.parametrize("ttl_s", [3599, 10 * 365 * 24 * 3600 + 1, -1, 0])
def test_a_lifetime_is_an_hour_to_ten_years(store: CheckpointStore, adapter: Adapter, ttl_s: int) -> None:
    with pytest.raises(UsageError, match="ttl_seconds must be 3600"):
        store.save(MODEL, "weights", "a", INFO, write_adapter(adapter), ttl_s=ttl_s)
    path = store.save(MODEL, "weights", "a", INFO, write_adapter(adapter))
    with pytest.raises(UsageError, match="ttl_seconds must be 3600"):
        store.set_ttl(path, ttl_s)


def test_an_expired_checkpoint_is_absent_and_its_folder_is_removed(
    adapter: Adapter, config: ModelConfig, tmp_path: Path
) -> None:
    now = [1000.0]
    store = CheckpointStore(tmp_path / "root", clock=lambda: now[0])
    path = store.save(MODEL, "sampler_weights", "a", INFO, write_adapter(adapter), ttl_s=3600)
    stored = store.save(MODEL, "weights", "b", INFO, write_adapter(adapter))
    now[0] += 3599
    store.load(path, config)
    now[0] += 1
    for attempt in (
        lambda: store.get(path).info,
        lambda: store.load(path, config),
        lambda: store.set_ttl(path, None),
        lambda: store.delete(path),
        lambda: store.copy(path, "copy"),
    ):
        with pytest.raises(MissingError, match="has expired"):
            attempt()
    assert [checkpoint.path for checkpoint in store.checkpoints()] == [stored]
    assert not (tmp_path / "root" / "abc_train_0" / "sampler_weights" / "a").exists()
    assert store.save(MODEL, "sampler_weights", "a", INFO, write_adapter(adapter)) == path


def test_a_lifetime_can_be_set_and_removed(adapter: Adapter, tmp_path: Path) -> None:
    now = [1000.0]
    store = CheckpointStore(tmp_path / "root", clock=lambda: now[0])
    path = store.save(MODEL, "weights", "a", INFO, write_adapter(adapter), user_metadata={"k": "v"})
    store.set_ttl(path, 7200)
    assert store.get(path).expires == 8200
    store.set_ttl(path, None)
    now[0] += 1e9
    checkpoint = store.get(path)
    assert (checkpoint.expires, checkpoint.created, checkpoint.user_metadata) == (None, 1000, {"k": "v"})


def test_a_copy_outlives_its_source(store: CheckpointStore, config: ModelConfig, adapter: Adapter) -> None:
    path = store.save(MODEL, "weights", "a", INFO, write_adapter(adapter), ttl_s=3600)
    copy = store.copy(path, "other")
    assert copy == store.copy(path, "other") == "tinker://other:train:0/weights/a"
    store.delete(path)
    assert torch.equal(store.load(copy, config)[0].flat, adapter.flat)
    assert [run.model_id for run in store.records.runs()] == ["other:train:0"]
    assert store.get(copy).expires is None


def test_leftovers_of_a_killed_but_not_of_a_live_server_are_swept(
    store: CheckpointStore, adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "root" / "abc_train_0" / "weights"
    write = checkpoints_module.save_file

    def swept_meanwhile(tensors: dict[str, torch.Tensor], file: Path) -> None:
        write(tensors, file)
        CheckpointStore(tmp_path / "root").sweep()

    monkeypatch.setattr(checkpoints_module, "save_file", swept_meanwhile)
    path = store.save(MODEL, "weights", "a", INFO, write_adapter(adapter))
    half, orphan = folder / "b" / ("0" * 16), folder / "a" / ("1" * 16)
    for left in (half, orphan):
        left.mkdir(parents=True)
        (left / "tensors.safetensors").write_bytes(b"half")
    (folder / "a" / ".checkpoint.json.00.tmp").write_text("{")
    assert [checkpoint.path for checkpoint in store.checkpoints()] == [path]
    CheckpointStore(tmp_path / "root").sweep()
    assert [p.name for p in folder.iterdir()] == ["a"]
    assert len(list((folder / "a").iterdir())) == 2


def test_a_link_out_of_the_store_is_neither_read_nor_deleted(
    store: CheckpointStore, adapter: Adapter, tmp_path: Path
) -> None:
    outside = CheckpointStore(tmp_path / "outside")
    outside.save(MODEL, "weights", "a", INFO, write_adapter(adapter))
    there = tmp_path / "outside" / "abc_train_0"
    root = tmp_path / "root"
    (root / "kind_train_0").mkdir(parents=True)
    (root / "name_train_0" / "weights").mkdir(parents=True)
    (root / "run_train_0").symlink_to(there)
    (root / "kind_train_0" / "weights").symlink_to(there / "weights")
    (root / "name_train_0" / "weights" / "a").symlink_to(there / "weights" / "a")
    for run in ("run", "kind", "name"):
        with pytest.raises(MissingError):
            store.delete(f"tinker://{run}:train:0/weights/a")
    assert store.checkpoints() == []
    assert outside.get("tinker://abc:train:0/weights/a").info == INFO


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format": 1}', '{"format": 3}', '{"format": 3, "data": "../../../b"}']
)
def test_a_checkpoint_of_an_unknown_format_is_rejected_and_kept(
    store: CheckpointStore, adapter: Adapter, tmp_path: Path, text: str
) -> None:
    path = store.save(MODEL, "weights", "a", INFO, write_adapter(adapter))
    file = tmp_path / "root" / "abc_train_0" / "weights" / "a" / "checkpoint.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="damaged, or written by another version"):
        store.get(path)
    assert store.checkpoints() == []
    assert file.read_text() == text


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw | {"format": 2},
        lambda raw: raw | {"more": 1},
        lambda raw: raw | {"info": raw["info"] | {"more": 1}},
        lambda raw: raw | {"created": str(raw["created"])},
        lambda raw: raw | {"data": f"../a/{raw['data']}"},
    ],
    ids=["format", "field", "inner field", "type", "place"],
)
def test_a_checkpoint_with_unexpected_metadata_is_rejected(
    store: CheckpointStore, adapter: Adapter, tmp_path: Path, change: Callable[[dict[str, object]], object]
) -> None:
    path = store.save(MODEL, "weights", "a", INFO, write_adapter(adapter))
    file = tmp_path / "root" / "abc_train_0" / "weights" / "a" / "checkpoint.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(UsageError, match="damaged, or written by another version"):
        store.get(path)


def test_records_are_found_only_by_their_owner(store: CheckpointStore, adapter: Adapter) -> None:
    for model_id in ("a:train:0", "a:train:1", "ab:train:0", "a_train_b:train:0"):
        store.save(model_id, "weights", "w", INFO, write_adapter(adapter))
        store.records.add_run(Run(model_id, "llama", 2, 0.0))
    store.records.add_session(SessionRecord("a", 0.0))
    assert store.records.session("a") == SessionRecord("a", 0.0)
    assert [run.model_id for run in store.records.runs("a")] == ["a:train:0", "a:train:1"]
    assert {checkpoint.path.split("/")[2] for checkpoint in store.checkpoints("a")} == {"a:train:0", "a:train:1"}
    assert store.records.run("a:train:1") == Run("a:train:1", "llama", 2, 0.0)
    for nobody in ("", "*", "?", "..", "../a", "a:train", "b", "a/../a"):
        assert store.records.session(nobody) is None
        assert store.records.run(nobody) is None
        assert store.records.runs(nobody) == []
        assert store.checkpoints(nobody) == []


def test_records_that_no_checkpoint_needs_are_kept_for_a_month(adapter: Adapter, tmp_path: Path) -> None:
    month_s = 30 * 24 * 3600
    now = [1e9]
    store = CheckpointStore(tmp_path / "root", clock=lambda: now[0])
    for name in ("empty", "kept", "deleted", "newer"):
        created = now[0] + month_s / 2 * (name == "newer")
        store.records.add_session(SessionRecord(name, created))
        store.records.add_run(Run(f"{name}:train:0", "llama", 2, created))
    store.records.add_session(SessionRecord("sampled", now[0]))
    store.save("kept:train:0", "weights", "a", INFO, write_adapter(adapter))
    store.delete(store.save("deleted:train:0", "weights", "a", INFO, write_adapter(adapter)))

    def list_ids() -> tuple[set[str], set[str]]:
        sessions = {session.session_id for session in store.records.sessions()}
        return sessions, {run.model_id.partition(":")[0] for run in store.records.runs()}

    store.sweep()
    everything = {"empty", "kept", "deleted", "newer"}
    assert list_ids() == (everything | {"sampled"}, everything)
    now[0] += month_s + 1
    store.sweep()
    assert list_ids() == ({"kept", "newer"}, {"kept", "newer"})
    assert not (tmp_path / "root" / "empty_train_0").exists()
    assert not (tmp_path / "root" / "deleted_train_0").exists()


def test_checkpoints_have_a_path_for_any_model_number(store: CheckpointStore, adapter: Adapter) -> None:
    model_id = new_id("abc", "train", 2**31 - 1)
    path = store.save(model_id, "weights", "a", INFO, write_adapter(adapter))
    store.records.add_run(Run(model_id, "llama", 2, 0.0))
    assert store.get(path).info == INFO
    assert store.records.run(model_id) is not None
    with pytest.raises(UsageError, match="must be 0"):
        new_id("abc", "train", 2**31)


def test_a_record_may_be_written_by_concurrent_threads(tmp_path: Path) -> None:
    records = Records(tmp_path)
    sessions = [SessionRecord("a", float(i), {"name": "x" * 1000}) for i in range(400)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(records.add_session, sessions))
    assert records.session("a") in sessions
    assert [file.name for file in (tmp_path / ".sessions").iterdir()] == ["a.json"]


def test_old_snapshots_spill_to_disk_and_survive_a_sweep(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_module, "_MEMORY_BYTES_MAX", 1)
    folder = snapshots_module.scratch_folder(tmp_path)
    snapshots = Snapshots(folder)
    adapters = [make_adapter(config, LoraSettings(2), seed=i).snapshot() for i in range(3)]
    for i, adapter in enumerate(adapters):
        snapshots.put(f"s:{i}", adapter)
    assert len(list(folder.glob("*.safetensors"))) == 2
    CheckpointStore(tmp_path).sweep()
    for i, adapter in enumerate(adapters):
        stored = snapshots.get(f"s:{i}")
        assert stored is not None
        assert torch.equal(stored.flat, adapter.flat)
    monkeypatch.setattr(snapshots_module, "_DISK_BYTES_MAX", 2 * adapters[0].flat.numel() * 4)
    snapshots.put("s:3", adapters[0])
    assert snapshots.get("s:0") is None
    assert len(list(folder.glob("*.safetensors"))) == 2
    snapshots.remove_prefix("s:")
    assert snapshots.get("s:1") is None
    snapshots.close()
    assert not folder.exists()


def test_the_snapshots_of_a_killed_server_are_swept(tmp_path: Path) -> None:
    folder = snapshots_module.scratch_folder(tmp_path)
    imports = "import sys, fcntl, pathlib; from rlkit.engine.storage.files import hold_lock"
    hold = "with hold_lock(pathlib.Path(sys.argv[1]), fcntl.LOCK_EX): print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", f"{imports}\n{hold}", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"locked\n"
        (folder / "0-s.safetensors").write_bytes(b"spilled")
        store = CheckpointStore(tmp_path)
        store.sweep()
        assert folder.exists()
        server.kill()
        server.wait()
        store.sweep()
    assert not folder.exists()


def test_a_result_can_be_retrieved_again_and_only_delivered_results_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(promises_module, "_DELIVERED_BYTES_MAX", 2 * (8 + promises_module._OVERHEAD_BYTES))
    promises = Promises()
    first, new = promises.get_or_make("a")
    assert new
    assert promises.get_or_make("a") == (first, False)

    async def ask() -> None:
        assert await first.wait(0.01) is None
        first.resolve(json_answer({"n": 1}))
        first.fail("too late", "server")
        answer = await first.wait(1)
        assert answer is not None
        assert answer.body == b'{"n": 1}'

    asyncio.run(ask())
    promises.get_or_make("b")
    promises.mark_delivered(first, 8)
    assert promises.get("a") is first
    for name in ("c", "d"):
        promises.mark_delivered(promises.get_or_make(name)[0], 8)
    assert promises.get("a") is None
    assert promises.get("b") is not None


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, rlkit.engine; print([m for m in ('torch', 'tinker', 'starlette') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
