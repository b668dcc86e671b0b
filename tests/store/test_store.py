from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rlkit.config import Resolved
from rlkit.config.schema import Config, EnvConfig
from rlkit.envs.math.arithmetic import arithmetic
from rlkit.errors import UsageError
from rlkit.sources import Task
from rlkit.store import RunStore
from rlkit.store.history import Member, load, read_groups, table_path
from rlkit.trackers import Checkpoint
from tests.builders import episode

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
    assert (about["status"], about["seed"], about["format"]) == ("completed", 5, 2)
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


def test_an_episode_that_is_rewarded_once_its_group_is_complete_is_kept_with_that_reward_alone(tmp_path: Path) -> None:
    async def main() -> None:
        with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
            store.open({}, decode=lambda tokens: "")
            for draw in (0, 1):
                task = Task(draw, "arithmetic", arithmetic()[draw])
                store.record_draw(task)
                store.record_episode(task, episode(None))
                for reward in (0.5, 2.0):
                    store.record_episode(task, replace(episode(reward), attempt=1))
            await store.record_step([Member(0, counts=True, size=1)], {})
            await store.close()

    asyncio.run(main())
    (kept,) = read_groups(table_path(tmp_path / "run", 1))
    assert [one.reward for one in kept.attempts] == [None, 2.0]
    assert kept.group.rewards.tolist() == [2.0]
    assert [one.reward for one in load(tmp_path / "run").attempts[1]] == [None, 2.0]
