"""Weights that a run has saved are listed, and exported for other programs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

import rlkit as toolkit
from rlkit.engine import EngineServer
from rlkit.errors import ServiceError
from rlkit.testing import byte_model
from rlkit.tinker_client.connector import ServiceAddress
from rlkit.tinker_client.sdk import TinkerService
from rlkit.tools.export import export
from rlkit.types import Prompt
from tests.engine.conftest import connect
from tests.engine.test_families import make

TEXT = np.frombuffer(b"the cat sat on the mat", np.uint8).astype(np.int32)


class Vowels(toolkit.SingleTurnEnv):
    """The share of the reply's bytes that are below 128."""

    def prompt(self) -> str:
        return "?"

    def grade(self, reply: toolkit.Reply) -> float:
        return float(np.mean(reply.turn.completion < 128))


HELD_OUT_TASKS = [Vowels()]


@dataclass(frozen=True)
class Trained:
    server: EngineServer
    model: Path
    directory: Path
    result: toolkit.RunResult


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    root = tmp_path_factory.mktemp("trained")
    model = byte_model(root / "model")
    with EngineServer(threads=1, device="cpu", root=root / "engine") as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLKIT_RUNS_DIR", str(root / "runs"))
        patch.setenv("TINKER_BASE_URL", server.url)
        patch.setenv("TINKER_API_KEY", server.api_key)
        result = toolkit.train(
            model=str(model),
            name="first",
            envs=[Vowels()],
            steps=3,
            batch={"groups": 2, "group_size": 4},
            sampling={"max_tokens": 4},
            optimizer={"learning_rate": 0.02},
            checkpoint={"every": 1},
            eval={"envs": {"held_out": {"env": f"{__file__}:HELD_OUT_TASKS"}}, "every": 1},
            lora={"rank": 4},
            trackers=[],
        )
        yield Trained(server, model, root / "runs" / "first", result)


@pytest.fixture(autouse=True)
def _service(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(trained.directory.parent))
    monkeypatch.setenv("TINKER_BASE_URL", trained.server.url)
    monkeypatch.setenv("TINKER_API_KEY", trained.server.api_key)


def last_checkpoint(trained: Trained) -> toolkit.Checkpoint:
    assert trained.result.checkpoint is not None
    return trained.result.checkpoint


def score_text(trained: Trained, checkpoint: toolkit.Checkpoint) -> np.ndarray:
    """Log-probabilities of the text from the engine."""

    async def request_logprobs() -> np.ndarray:
        async with TinkerService(
            ServiceAddress(base_url=trained.server.url, api_key=trained.server.api_key)
        ) as service:
            compute_score = await service.scorer(model=str(trained.model), checkpoint=checkpoint.sampler)
            return (await compute_score(Prompt(TEXT), len(TEXT) - 1, 0)).logprobs

    return asyncio.run(request_logprobs())


def test_checkpoints_of_a_run_are_listed_newest_first(trained: Trained, rlkit: Callable[..., Any]) -> None:
    result = rlkit("checkpoints", "list", "first", "--json")
    rows = json.loads(result.stdout)
    assert [row["step"] for row in rows] == [3, 2, 1]
    assert rows[0]["path"] == last_checkpoint(trained).state
    assert all(row["exists"] and row["kind"] == "training" and row["size_bytes"] > 1000 for row in rows)
    assert trained.result.best_checkpoint is not None
    assert [row["step"] for row in rows if row["best"]] == [trained.result.best_checkpoint.step]
    lines = rlkit("checkpoints", "list", "first").stdout.splitlines()
    assert lines[0].startswith("step 3 ")
    assert "expires 20" in lines[0]
    assert len([line for line in lines if line.endswith("best")]) == 1


def test_all_checkpoints_of_the_service_are_listed(trained: Trained, rlkit: Callable[..., Any]) -> None:
    rows = json.loads(rlkit("checkpoints", "list", "--json").stdout)
    paths = {row["path"]: row["kind"] for row in rows}
    assert paths[last_checkpoint(trained).state] == "training"
    assert paths[last_checkpoint(trained).sampler] == "sampler"
    assert last_checkpoint(trained).state in rlkit("checkpoints", "list").stdout


def test_merged_model_has_the_logprobs_of_the_trained_one(
    trained: Trained, rlkit: Callable[..., Any], tmp_path: Path
) -> None:
    result = rlkit("checkpoints", "export", "first", tmp_path / "deep" / "merged", "--merged")
    assert result.exit_code == 0, result.stderr
    assert str(tmp_path / "deep" / "merged") in result.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "merged", dtype=torch.float32)
    with torch.no_grad():
        scores = model(torch.from_numpy(TEXT).long()[None]).logits[0].log_softmax(-1).numpy()
    merged_logprobs = scores[np.arange(len(TEXT) - 1), TEXT[1:]]
    assert np.abs(merged_logprobs - score_text(trained, last_checkpoint(trained))).max() < 1e-4
    base = AutoModelForCausalLM.from_pretrained(trained.model, dtype=torch.float32)
    with torch.no_grad():
        untrained = base(torch.from_numpy(TEXT).long()[None]).logits[0].log_softmax(-1).numpy()
    assert np.abs(merged_logprobs - untrained[np.arange(len(TEXT) - 1), TEXT[1:]]).max() > 0.01
    assert (tmp_path / "deep" / "merged" / "tokenizer.json").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["merged"]


def test_adapter_loaded_by_peft_has_the_logprobs_of_the_trained_model(
    trained: Trained, rlkit: Callable[..., Any], tmp_path: Path
) -> None:
    from peft import PeftModel  # takes seconds

    result = rlkit("checkpoints", "export", last_checkpoint(trained).state, tmp_path / "adapter", "--json")
    assert json.loads(result.stdout) == {
        "checkpoint": last_checkpoint(trained).state,
        "form": "adapter",
        "directory": str(tmp_path / "adapter"),
    }
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", 4)
    assert config["base_model_name_or_path"] is None  # a folder of this machine is no name elsewhere
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert tensors[first].shape == (4, 64)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(trained.model, dtype=torch.float32), tmp_path / "adapter"
    )
    with torch.no_grad():
        scores = model(torch.from_numpy(TEXT).long()[None]).logits[0].log_softmax(-1).numpy()
    adapter_logprobs = scores[np.arange(len(TEXT) - 1), TEXT[1:]]
    assert np.abs(adapter_logprobs - score_text(trained, last_checkpoint(trained))).max() < 1e-4
    assert len({path.stat().st_mode for path in (tmp_path / "adapter").iterdir()}) == 1


@pytest.mark.parametrize("place", ["cache/models/tiny--bytes", "hub/models--tiny--bytes/snapshots/main"])
def test_adapter_names_its_base_model_as_on_the_hub(
    place: str, rlkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel  # takes seconds

    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("RLKIT_ENGINE_DIR", str(tmp_path / "engine"))
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path / "cache"))
    model = byte_model(tmp_path / place)
    in_cache = place.startswith("cache")
    toolkit.train(
        model="tiny/bytes" if in_cache else str(model),
        name="first",
        envs=[Vowels()],
        steps=1,
        batch={"groups": 1, "group_size": 2},
        sampling={"max_tokens": 2},
        lora={"rank": 4},
        trackers=[],
    )
    for command in ("export", "download"):
        result = rlkit("checkpoints", command, "first", tmp_path / command)
        assert result.exit_code == 0, result.stderr
        config = json.loads((tmp_path / command / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "tiny/bytes"
        for file in (tmp_path / command).iterdir():
            assert str(tmp_path).encode() not in file.read_bytes()
    adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "export")
    assert adapter.peft_config["default"].base_model_name_or_path == "tiny/bytes"


def test_checkpoint_is_selected_by_step_or_as_best(trained: Trained, rlkit: Callable[..., Any], tmp_path: Path) -> None:
    assert trained.result.best_checkpoint is not None
    for arguments, step in ((["--step", "1"], 1), (["--best"], trained.result.best_checkpoint.step)):
        result = rlkit("checkpoints", "export", "first", tmp_path / arguments[0], *arguments, "--json")
        assert json.loads(result.stdout)["checkpoint"].endswith(f"/weights/step-{step:06d}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["first", "--step", "7"], "--step: first has no checkpoint of step 7; it has 1, 2, 3"),
        (["first", "--step", "1", "--best"], "--step and --best exclude each other"),
        (["nonsense"], "there is no run 'nonsense'"),
        (["tinker://x:train:0/weights/a", "--best"], "--step and --best apply to the checkpoints of a run"),
        (["tinker://x:train:0/sampler_weights/a"], "weights/… paths can be exported"),
        (["tinker://x:train:0/weights/a"], "tinker://x:train:0/weights/a"),
    ],
)
def test_invalid_export_is_an_error_of_one_line(
    arguments: list[str], message: str, rlkit: Callable[..., Any], tmp_path: Path
) -> None:
    result = rlkit("checkpoints", "export", arguments[0], tmp_path / "out", *arguments[1:])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_exported_is_an_error_of_one_line(
    trained: Trained, rlkit: Callable[..., Any], tmp_path: Path
) -> None:
    model = make(byte_model(tmp_path / "phi3"), "phi3", vocab_size=259)
    with connect(trained.server) as client:
        path = client.create_lora_training_client(str(model), rank=4).result().save_state("state").result().path
    result = rlkit("export", path, "--to", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.endswith(
        f"error: downloading {path}: Request failed: save_weights_external: the matrices of {model} are fused, which "
        "peft does not support\n"
    )


def test_existing_folder_is_not_overwritten(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    result = rlkit("checkpoints", "export", "first", tmp_path / "out")
    assert result.exit_code == 2
    assert "exists" in result.stderr
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("file", "file exists: choose another name"),
        ("full", "full exists: choose another name"),
        ("dangling", "dangling exists: choose another name"),
        ("new/..", "new/.. exists: choose another name"),
        (".", ". exists: choose another name"),
        ("file/inside", "file/inside cannot be written: Not a directory"),
        ("/proc/nothing", "/proc/nothing cannot be written: "),
        ("x" * 300, "cannot be written: File name too long"),
        ("x" * 250, "cannot be written: File name too long"),
        ("circle/inside", "circle/inside cannot be written: "),
    ],
)
def test_unwritable_target_is_an_error_before_the_download(
    target: str, message: str, rlkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    files_before = sorted(path.name for path in tmp_path.rglob("*"))
    result = rlkit("checkpoints", "export", "first", target)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == files_before
    assert (tmp_path / "file").read_text() == "mine"


def test_failed_export_leaves_no_file(trained: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tinker_cookbook import weights
    from tinker_cookbook.exceptions import WeightsDownloadError

    def broken(**_: object) -> None:
        raise WeightsDownloadError("the connection broke")

    monkeypatch.setattr(weights, "download", broken)
    for place in (tmp_path / "out", tmp_path / "deep" / "deeper" / "out"):
        with pytest.raises(ServiceError, match="the connection broke"):
            asyncio.run(export(last_checkpoint(trained).state, place))
    assert not list(tmp_path.iterdir())


def test_checkpoint_missing_on_the_service_is_listed_as_gone(
    trained: Trained, rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with EngineServer(threads=1, device="cpu", root=tmp_path / "empty") as other:
        monkeypatch.setenv("TINKER_BASE_URL", other.url)
        monkeypatch.setenv("TINKER_API_KEY", other.api_key)
        assert "gone" in rlkit("checkpoints", "list", "first").stdout
        assert rlkit("checkpoints", "list").stdout == "there are no checkpoints\n"
        result = rlkit("checkpoints", "export", "first", tmp_path / "out")
    assert result.exit_code == 2
    assert last_checkpoint(trained).state in result.stderr
