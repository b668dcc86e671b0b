from __future__ import annotations

import os
from pathlib import Path

import pytest

import rlkit
from rlkit._util import paths
from rlkit.testing import ByteChat, SimulatedTinker, run_virtual
from tests.simulation import Word


def test_a_path_of_an_unknown_user_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert paths.expand_user("~/runs") == Path("/home/me/runs")
    assert paths.expand_user(Path("~no-such-user/runs")) == Path("~no-such-user/runs")


@pytest.mark.parametrize("name", ["RLKIT_RUNS_DIR", "RLKIT_ENGINE_DIR", "RLKIT_CACHE_DIR"])
def test_a_relative_folder_is_resolved_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {
        "RLKIT_RUNS_DIR": paths.runs_dir,
        "RLKIT_ENGINE_DIR": paths.engine_dir,
        "RLKIT_CACHE_DIR": paths.cache_dir,
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, f"relative-{name}")
    assert functions[name]() == tmp_path / f"relative-{name}"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    assert functions[name]() == tmp_path / f"relative-{name}"


class Wanders(Word):
    def prompt(self) -> str:
        Path("elsewhere").mkdir(exist_ok=True)
        os.chdir("elsewhere")
        return super().prompt()


@pytest.mark.parametrize("is_explicit", [True, False], ids=["directory", "name"])
def test_a_run_keeps_its_folder_although_its_environment_changes_the_working_directory(
    is_explicit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLKIT_RUNS_DIR", "relative-runs")
    monkeypatch.setattr(paths, "_absolute", Path.absolute)  # without what other tests took
    trainer = rlkit.RLTrainer(
        rlkit.Config(
            model="simulated", name="first", envs={"words": {}}, steps=2, batch={"groups": 2, "group_size": 2}
        ),
        envs={"words": [Wanders(number) for number in range(9)]},
        directory=Path("relative-runs/first") if is_explicit else None,
        service=SimulatedTinker(),
        chat=ByteChat(),
    )
    result = run_virtual(trainer.train())
    assert result.directory == tmp_path / "relative-runs" / "first"
    assert sorted(path.name for path in (result.directory / "episodes").iterdir()) == ["step=000001", "step=000002"]
    assert not list((tmp_path / "elsewhere").rglob("*.*"))
