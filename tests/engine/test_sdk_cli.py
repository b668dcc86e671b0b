"""The SDK's command line, `tinker`, on the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker
from safetensors.torch import load_file

from rlkit.engine import EngineServer

from .conftest import connect
from .helpers import ce_datum

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Result:
    """What a command left."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.stderr
        return json.loads(self.stdout)


@dataclass(frozen=True)
class Shell:
    """A server that trained one model and saved it twice, and the environment of its clients."""

    environ: Mapping[str, str]
    model: str
    run_id: str
    state: str
    sampler: str
    folder: Path

    def commands(self) -> dict[str, list[str]]:
        """Name commands in the order in which they run: later ones see what earlier ones did."""
        listing, info = (["-f", "json", "checkpoint", *rest] for rest in (["list"], ["info", self.state]))
        download = ["-f", "json", "checkpoint", "download", self.state, "--output", str(self.folder / "download")]
        of_run = ["--run-id", self.run_id]
        return {
            "version": ["version"],
            "status": ["auth", "status"],
            "models": ["-f", "json", "model", "list", "BYTE"],
            "runs": ["run", "list", "--columns", "id,model,lora,status,checkpoint"],
            "run": ["-f", "json", "run", "info", self.run_id],
            "checkpoints": listing,
            "checkpoints of the run": ["checkpoint", "list", *of_run],
            "checkpoint": info,
            "storage": ["-f", "json", "billing", "checkpoint-storage"],
            "publish": ["checkpoint", "publish", self.state],
            "published": info,
            "unpublish": ["checkpoint", "unpublish", self.state],
            "set-ttl": ["checkpoint", "set-ttl", self.state, "--ttl", "7200"],
            "set-ttl, too short": ["checkpoint", "set-ttl", self.state, "--ttl", "5"],
            "with a lifetime": info,
            "set-ttl, remove": ["checkpoint", "set-ttl", self.state, "--remove"],
            "without a lifetime": info,
            "download": download,
            "download again": download,
            "after the download": listing,
            "delete by type": ["checkpoint", "delete", *of_run, "--type", "sampler_weights", "--yes"],
            "one is left": listing,
            "delete by path": ["-f", "json", "checkpoint", "delete", "--yes", self.state, self.sampler],
            "none is left": listing,
            "missing run": ["run", "info", "nothing"],
            "trace": ["-f", "json", "session", "export-trace", self.run_id.partition(":")[0]],
            "usage": ["billing", "usage", "2026-01-01", "2026-02-01"],
            "whoami": ["auth", "whoami"],
        }


@pytest.fixture(scope="module")
def shell(byte_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("cli")
    model = str(byte_model_dir)
    with EngineServer(root=folder / "root", models=[model], threads=1) as server, connect(server) as client:
        trainer = client.create_lora_training_client(base_model=model, rank=4, user_metadata={"goal": "none"}).result()
        trainer.forward_backward([ce_datum([1, 2, 3])], "cross_entropy")
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        state = trainer.save_state("state").result().path
        sampler = trainer.save_weights_for_sampler("sampler").result().path
        own = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.api_key, "TINKER_TELEMETRY": "0"}
        # HOME has no credentials of a user, and COLUMNS keeps the paths of a table whole.
        own |= {"HOME": str(folder), "COLUMNS": "300", "HF_HUB_OFFLINE": "1"}
        yield Shell({**os.environ, **own}, model, trainer.model_id, state, sampler, folder)


@pytest.fixture(scope="module")
def results(shell: Shell) -> dict[str, Result]:
    commands = shell.commands()
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sdk_commands.py"))],
        env=shell.environ,
        input=json.dumps([*commands.values()]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return {name: Result(*result) for name, result in zip(commands, json.loads(child.stdout), strict=True)}


def test_the_installed_command_prints_json(shell: Shell) -> None:
    command = [str(Path(sys.executable).with_name("tinker")), "--format", "json", "run", "info", shell.run_id]
    child = subprocess.run(command, env=shell.environ, capture_output=True, text=True, check=True)
    assert json.loads(child.stdout)["training_run_id"] == shell.run_id


def test_the_service_and_its_models_are_shown(shell: Shell, results: Mapping[str, Result]) -> None:
    assert results["version"].stdout == f"tinker {tinker.__version__}\n"
    assert "Tinker accessible: yes" in results["status"].stdout
    model = {"model_name": shell.model, "max_context_length": 4096, "trainable": True, "sampleable": True}
    assert results["models"].json["models"] == [model]


def test_runs_and_checkpoints_are_shown(shell: Shell, results: Mapping[str, Result]) -> None:
    assert "1 training run" in results["runs"].stdout
    for cell in (shell.run_id, shell.model, "Rank 4", "OK", "weights/state"):
        assert f" {cell} " in results["runs"].stdout
    run = results["run"].json
    assert (run["base_model"], run["lora_rank"], run["user_metadata"]) == (shell.model, 4, {"goal": "none"})
    paths = {line["tinker_path"]: line for line in results["checkpoints"].json["checkpoints"]}
    assert paths.keys() == {shell.state, shell.sampler}
    for text in (f"2 checkpoints for run {shell.run_id}", shell.state, shell.sampler):
        assert text in results["checkpoints of the run"].stdout
    assert results["checkpoint"].json == {**paths[shell.state], "is_lora": True, "lora_rank": 4}
    (usage,) = results["storage"].json["data"]
    assert (usage["checkpoint_count"], usage["size_bytes"]) == (2, sum(c["size_bytes"] for c in paths.values()))


def test_a_checkpoint_is_published_and_given_a_lifetime(results: Mapping[str, Result]) -> None:
    assert [results[name].code for name in ("publish", "unpublish", "set-ttl", "set-ttl, remove")] == [0, 0, 0, 0]
    short = results["set-ttl, too short"]
    assert short.code == 1
    assert "ttl_seconds must be 3600" in short.stderr
    before, published, limited, after = (
        results[name].json for name in ("checkpoint", "published", "with a lifetime", "without a lifetime")
    )
    assert published == {**before, "public": True}
    assert limited["expires_at"] is not None
    assert limited == {**before, "expires_at": limited["expires_at"]}
    assert after == before


def test_a_state_is_downloaded_as_an_adapter_and_leaves_no_export(shell: Shell, results: Mapping[str, Result]) -> None:
    download = results["download"].json
    folder = Path(download["destination"])
    assert folder.parent == shell.folder / "download"
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    assert load_file(folder / "adapter_model.safetensors")
    assert download["file_size_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert results["download again"].code == 1
    assert "already exists" in results["download again"].stderr
    paths = [line["tinker_path"] for line in results["after the download"].json["checkpoints"]]
    assert sorted(paths) == sorted([shell.state, shell.sampler])


def test_checkpoints_are_deleted_by_type_and_by_path(shell: Shell, results: Mapping[str, Result]) -> None:
    assert "Deleted 1 checkpoint(s)" in results["delete by type"].stdout
    assert [line["tinker_path"] for line in results["one is left"].json["checkpoints"]] == [shell.state]
    by_path = results["delete by path"].json
    assert by_path["deleted_count"] == 1
    assert [failure["tinker_path"] for failure in by_path["failed"]] == [shell.sampler]
    assert results["none is left"].json["checkpoints"] == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing run", "no training run 'nothing'"),
        ("trace", "trace_export is not offered by the embedded engine"),
        ("usage", "is not offered by the embedded engine"),
        ("whoami", "the credential is a plain API key"),
    ],
)
def test_a_command_that_fails_says_why_in_two_lines(results: Mapping[str, Result], name: str, reason: str) -> None:
    result = results[name]
    assert result.code == 1
    assert reason in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 2
