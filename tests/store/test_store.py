from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlkit.config import Resolved
from rlkit.config.schema import Config, EnvConfig
from rlkit.errors import UsageError
from rlkit.store import RunStore
from rlkit.trackers import Checkpoint

RESOLVED = Resolved.from_python(Config(envs={"arithmetic": EnvConfig()}, seed=5))


def test_a_run_is_readable_with_plain_tools(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
        store.add_metrics(1, {"env/all/reward/mean": 0.5})
        store.add_metrics(2, {"env/all/reward/mean": 0.75})
        store.add_checkpoint(Checkpoint(2, "tinker://a/weights/b", "tinker://a/sampler_weights/b", expires=3.0))
        store.about.set_status("completed")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "env/all/reward/mean": 0.5},
        {"step": 2, "env/all/reward/mean": 0.75},
    ]
    (checkpoint,) = (tmp_path / "run" / "checkpoints.jsonl").read_text().splitlines()
    assert json.loads(checkpoint)["state"] == "tinker://a/weights/b"
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (about["status"], about["seed"], about["format"]) == ("completed", 5, 1)
    assert about["versions"]["tinker"]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 5


def test_the_recorded_configuration_is_a_configuration(tmp_path: Path) -> None:
    from rlkit.config import load_config

    RunStore(tmp_path / "run", resolved=RESOLVED).__exit__()
    assert load_config([tmp_path / "run" / "config.yaml"]).config == RESOLVED.config


def test_a_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
        store.add_metrics(1, {})
    with pytest.raises(UsageError, match=r"already holds a run: resume it \(--resume\), or choose another name"):
        RunStore(tmp_path / "run", resolved=RESOLVED)


def test_a_run_that_never_began_is_replaced(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
        store.about.set_status("failed", error="no such model")
    with RunStore(tmp_path / "run", resolved=RESOLVED):
        assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "running"


def test_two_processes_cannot_write_to_one_run(tmp_path: Path) -> None:
    with (
        RunStore(tmp_path / "run", resolved=RESOLVED),
        pytest.raises(UsageError, match="another process is writing to"),
    ):
        RunStore(tmp_path / "run", resolved=RESOLVED)


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="RLKIT_RUNS_DIR"):
        RunStore(tmp_path / "file" / "run", resolved=RESOLVED)


def test_the_error_of_a_run_is_kept_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_PASSWORD", "swordfish in the well")
    config = Config(
        envs={"arithmetic": EnvConfig(args={"api_key": "abcd1234abcd1234", "token": "abcd1234abcd1234xyz"})}
    )
    with RunStore(tmp_path / "run", resolved=Resolved.from_python(config)) as store:
        said = "401 for abcd1234abcd1234, abcd1234abcd1234xyz, sk-live-abcdefghij123456 and swordfish in the well"
        store.about.set_status("failed", error=said)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["error"] == "401 for [redacted], [redacted], [redacted] and ***"
