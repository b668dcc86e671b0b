"""The pictures that environments draw reach the page of their episode."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlkit.store import table
from rlkit.store.history import read_groups, table_path
from rlkit.view.run_reader import RunReader
from tests.simulation import Simulation, Word

SCRIPT = "document.body.append(episode.task)"


class Drawn(Word):
    def render(self, episode: object) -> str | None:
        return "<b>drawn</b>" if self.task_id == "task-0" else None


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "run"
    Simulation(folder, settings={"steps": 2}, tasks=[Drawn(number) for number in range(2)]).train()
    return folder


def views(folder: Path) -> dict[str, Any]:
    reader = RunReader(folder)
    groups = reader.step(("step", 1))["groups"]
    return {group["task"]: reader.episode(("step", 1), (group["position"], 0, 0))["view"] for group in groups}


def test_the_html_of_an_episode_goes_before_the_script_of_its_environment(recorded: Path, tmp_path: Path) -> None:
    assert views(recorded) == {"task-0": {"html": "<b>drawn</b>"}, "task-1": None}
    folder = Path(shutil.copytree(recorded, tmp_path / "run"))
    script = folder / "artefacts" / "words" / "view.js"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT)
    assert views(folder) == {"task-0": {"html": "<b>drawn</b>"}, "task-1": {"script": SCRIPT}}


@pytest.mark.parametrize("env", ["x" * 300, "a\0b", "../..", "/tmp"])
def test_the_name_of_an_environment_leads_to_no_other_file(recorded: Path, tmp_path: Path, env: str) -> None:
    folder = Path(shutil.copytree(recorded, tmp_path / "run"))
    (tmp_path / "view.js").write_text(SCRIPT)
    path = table_path(folder, 1)
    rows = read_groups(path)
    table.write(path, [replace(row, group=replace(row.group, env=env)) for row in rows])
    assert views(folder)["task-1"] is None


def test_a_link_to_a_file_outside_the_run_is_not_followed(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = Path(shutil.copytree(recorded, tmp_path / "run"))
    script = folder / "artefacts" / "words" / "view.js"
    script.parent.mkdir(parents=True)
    script.symlink_to(tmp_path / "secret")
    assert views(folder)["task-1"] is None
