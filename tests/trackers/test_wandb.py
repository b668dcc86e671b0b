from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit.errors import MissingError, UsageError
from rlkit.trackers.sinks import settings_of, sink
from rlkit.trackers.sync import send
from tests.trackers.folders import write_run, write_step
from tests.trackers.wandb_files import read


def test_a_run_is_written_offline_and_goes_on_under_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_TOKEN", "canary-of-the-environment")
    directory = write_run(tmp_path / "run", steps=2, status="failed", settings={"model": "Qwen/Qwen3-8B"})
    given = {"mode": "offline", "project": "sums", "entity": "us", "tags": ["mine"], "rollouts": 3}
    settings = settings_of("wandb", given)
    send(directory, "wandb", sink("wandb", settings))
    write_step(directory, 3, text="canary-of-the-environment")
    send(directory, "wandb", sink("wandb", settings))

    folders = sorted((directory / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
    first, second = map(read, folders)
    assert (first.id, first.name, first.project, first.entity) == (second.id, "run", "sums", "us")
    assert sorted(first.tags) == ["lora_rank:32", "mine", "model:Qwen/Qwen3-8B"]
    assert (first.config["model"], first.config["batch"]["groups"]) == ("Qwen/Qwen3-8B", 16)
    assert [(one["step"], one["env/sums/reward/mean"]) for one in first.steps] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert [one["_step"] for one in second.steps] == [3]
    assert first.exit_code == 1
    table = next((folders[0] / "files" / "media" / "table").rglob("*.json"))
    rows = json.loads(table.read_text())
    assert len(rows["data"]) == 3
    assert dict(zip(rows["columns"], rows["data"][0], strict=True))["conversation"] == "what is 2+2? four"
    pages = list((directory / "wandb").rglob("*.html"))
    assert len(pages) == 3
    written = b"".join(path.read_bytes() for path in (directory / "wandb").rglob("*") if path.is_file())
    assert b"canary" not in written


def test_a_run_without_rollouts_has_numbers_only(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=1)
    send(directory, "wandb", sink("wandb", settings_of("wandb", {"mode": "offline", "rollouts": 0})))
    assert not list((directory / "wandb").rglob("media"))


def test_a_credential_is_asked_for_before_a_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(MissingError, match=r"WANDB_API_KEY is not set.*track\.wandb\.mode to offline"):
        sink("wandb", settings_of("wandb", {}))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / "netrc").chmod(0o600)
    sink("wandb", settings_of("wandb", {}))


def test_what_is_no_setting_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"track\.wandb\.projct: .*Did you mean 'project'"):
        settings_of("wandb", {"projct": "x"})
    with pytest.raises(UsageError, match=r"--to: 'wandbb' is none of .*Did you mean 'wandb'"):
        settings_of("wandbb", {})
