from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit.envs.harbor.registry import fetch, parsed
from rlkit.envs.harbor.tasks import Selection
from rlkit.errors import MissingError, UsageError

from .conftest import write_task


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    tasks = [{"name": path.name, "path": str(path)} for path in (write_task(tmp_path / f"task-{n}") for n in range(3))]
    datasets = [{"name": "tiny", "version": "0.1", "description": "", "tasks": tasks, "metrics": []}]
    path = tmp_path / "registry.json"
    path.write_text(json.dumps(datasets))
    return path


@pytest.mark.parametrize("dataset", ["tiny@0.1", "tiny==0.1", "tiny"])
def test_the_tasks_of_a_dataset_are_chosen_by_name(registry: Path, dataset: str) -> None:
    found = fetch(dataset, Selection(task_ids=["task-[12]"], shuffle=False), registry=str(registry))
    assert found == {f"task-{number}": registry.parent / f"task-{number}" for number in (1, 2)}


def test_a_dataset_that_is_not_there_is_told_in_one_line(registry: Path) -> None:
    with pytest.raises(MissingError, match=r"^dataset: tiny@0\.2 cannot be had from .*registry\.json .*tasks_dir$"):
        fetch("tiny@0.2", Selection(), registry=str(registry))


def test_of_two_tasks_with_one_name_none_is_dropped(registry: Path) -> None:
    (dataset,) = json.loads(registry.read_text())
    other = write_task(registry.parent / "other" / "task-1")
    dataset["tasks"].append({"name": "task-1", "path": str(other)})
    registry.write_text(json.dumps([dataset]))
    with pytest.raises(MissingError, match=r"^dataset: tiny has 2 tasks named 'task-1': give their folders"):
        fetch("tiny", Selection(), registry=str(registry))


def test_a_registry_that_cannot_be_reached_is_told_in_one_line() -> None:
    with pytest.raises(MissingError, match=r"^dataset: tiny@1 cannot be had from http://127\.0\.0\.1:9/registry\.json"):
        fetch("tiny@1", Selection(), registry="http://127.0.0.1:9/registry.json")


def test_a_dataset_has_a_name_and_perhaps_a_version() -> None:
    assert (
        parsed("terminal-bench-core==0.1.1") == parsed("terminal-bench-core@0.1.1") == ("terminal-bench-core", "0.1.1")
    )
    assert parsed("org/name") == ("org/name", None)
    for wrong in ("@1", "a@b@c"):
        with pytest.raises(UsageError, match="not of the form name@version"):
            parsed(wrong)
