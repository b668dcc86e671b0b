from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlkit.envs.harbor.checking import Checked
from tests.envs.harbor.conftest import write_task
from tests.envs.harbor.test_convert import old_task


@pytest.fixture(autouse=True)
def _tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are run in the tests of what is called; here they are said to have been."""

    async def check_tasks(tasks: dict[str, Path], *, told: Callable[[Checked], None], **_: object) -> Sequence[Checked]:
        full, nothing = {"reward": 1.0}, {"tests": 0.0, "style": 0.5}
        found = [
            Checked(name, "broken" if name == "bad" else "sound", full, nothing, "why" if name == "bad" else "", 0.5)
            for name in tasks
        ]
        for one in found:
            told(one)
        return found

    monkeypatch.setattr("rlkit.envs.harbor.checking.check_tasks", check_tasks)
    for name in ("good", "bad"):
        write_task(tmp_path / "tasks" / name)


def test_tasks_that_are_sound_are_a_table_and_0(rlkit: Callable[..., Any]) -> None:
    result = rlkit("tasks", "check", "tasks", "--task-id", "good")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1].split() == ["good", "sound", "1", "0/0.5", "0.5"]
    assert result.stderr == "good: sound\n"


def test_a_task_that_is_not_is_1_and_says_why(rlkit: Callable[..., Any]) -> None:
    result = rlkit("tasks", "check", "tasks", "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert record["ok"] is False
    assert {task["task_id"]: (task["finding"], task["detail"]) for task in record["tasks"]} == {
        "good": ("sound", ""),
        "bad": ("broken", "why"),
    }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["none"], "DIR: there is no folder"),
        (["tasks", "--task-id", "goood"], "task_ids: no task matches 'goood'. Near it: good"),
        (["tasks", "--environment", "dokker"], "Did you mean 'docker'?"),
        (["tasks", "--environment-kwargs", "memory=1"], "Did you mean 'memory_mb'?"),
    ],
)
def test_what_cannot_be_checked_is_2(arguments: list[str], told: str, rlkit: Callable[..., Any]) -> None:
    result = rlkit("tasks", "check", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_old_tasks_are_converted_and_listed(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    old_task(tmp_path / "old" / "answer")
    result = rlkit("tasks", "convert", "old", "--to", "new")
    assert (result.exit_code, result.stdout) == (0, f"made    {tmp_path / 'new' / 'answer'}\n")
    again = rlkit("tasks", "convert", "old", "--to", "new", "--json")
    assert again.exit_code == 1
    assert "already exists" in json.loads(again.stdout)["failed"]["answer"]
