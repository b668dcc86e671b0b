from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlkit
from rlkit.errors import MissingError, UsageError
from rlkit.trackers.from_config import load_service
from rlkit.trackers.sync import send
from tests.trackers.folders import write_run, write_step
from tests.trackers.wandb_stub import sync_offline_runs, wandb_stub

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_offline_run_continues_under_the_same_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_TOKEN", "canary-of-the-environment")
    directory = write_run(tmp_path / "run", steps=2, status="failed", settings={"model": "Qwen/Qwen3-8B"})
    settings = {"mode": "offline", "project": "sums", "entity": "us", "tags": ["mine"], "rollouts": 3}
    send(directory, load_service("wandb", settings))
    write_step(directory, 3, text="canary-of-the-environment")
    send(directory, load_service("wandb", settings))

    (first, second), bodies = sync_offline_runs(directory)
    assert (first.id, first.name, first.project, first.entity) == (second.id, "run", "sums", "us")
    assert sorted(first.tags) == ["lora_rank:32", "mine", "model:Qwen/Qwen3-8B"]
    assert (first.config["model"], first.config["batch"]["groups"]) == ("Qwen/Qwen3-8B", 16)
    assert [(step["step"], step["env/sums/reward/mean"]) for step in first.steps] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert [step["_step"] for step in second.steps] == [3]
    assert first.exit_code == 1
    rows = json.loads(next(content for name, content in first.files.items() if name.endswith(".table.json")))
    assert len(rows["data"]) == 3
    assert dict(zip(rows["columns"], rows["data"][0], strict=True))["conversation"] == "what is 2+2? four"
    pages = list((directory / "wandb").rglob("*.html"))
    assert len(pages) == 3
    files = [path.read_bytes() for path in (directory / "wandb").rglob("*") if path.is_file()]
    assert not [step for step in [*files, *bodies] if b"canary" in step]


@pytest.mark.slow
def test_resumed_run_continues_at_the_service(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=2)
    settings = ["project=sums", "entity=us", "rollouts=1"]
    with wandb_stub() as server:
        # A process each, as for a user: the package reads its variables once.
        command = [sys.executable, "-m", "rlkit", "sync", str(directory), "--to", "wandb", *settings]
        for step in (3, 4):
            process = subprocess.run(command, env={**os.environ, **server.environ}, check=False, capture_output=True)
            assert process.returncode == 0, process.stderr.decode()
            write_step(directory, step)
        (run,) = server.runs.values()
    assert [step["step"] for step in run.steps] == [0, 1, 2, 3]
    assert (run.name, run.exit_code) == ("run", 0)
    assert sorted(run.tags) == ["lora_rank:32", "model:HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert len([name for name in run.files if name.endswith(".html")]) == 3


def test_run_of_an_example_arrives_with_every_step_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte_model_dir: Path
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    monkeypatch.setenv("SOME_API_KEY", "canary-of-the-environment")
    result = rlkit.train(
        EXAMPLES / "arithmetic.yaml",
        model=str(byte_model_dir),
        steps=3,
        batch={"groups": 2, "group_size": 2},
        eval={"envs": {"arithmetic": {"tasks": 2}}},
        track={"wandb": {"mode": "offline"}},
    )
    (run,), bodies = sync_offline_runs(result.directory)
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert len(run.steps) == len(lines)
    for step, line in zip(run.steps, lines, strict=True):
        numbers = {name: value for name, value in line.items() if value is not None}
        assert {name: step[name] for name in numbers} == pytest.approx(numbers)
    assert (run.exit_code, run.config["batch"]["groups"]) == (0, 2)
    assert not [body for body in bodies if b"canary" in body]


@pytest.mark.slow
def test_a_run_without_rollouts_has_numbers_only(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=1)
    send(directory, load_service("wandb", {"mode": "offline", "rollouts": 0}))
    assert not list((directory / "wandb").rglob("media"))


def test_missing_credential_is_an_error_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(MissingError, match=r"no login for Weights & Biases.*track\.wandb\.mode to offline"):
        load_service("wandb", {})
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / "netrc").chmod(0o600)
    load_service("wandb", {})


def test_unknown_setting_is_an_error_of_one_line() -> None:
    with pytest.raises(UsageError, match=r"track\.wandb\.projct: .*Did you mean 'project'"):
        load_service("wandb", {"projct": "x"})
    with pytest.raises(UsageError, match=r"--to: 'wandbb' is not one of .*Did you mean 'wandb'"):
        load_service("wandbb", {})
