from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlkit.envs.harbor.checking import TaskCheck
from rlkit.redteam.report import Attempt, RedTeamReport, classify_attempt
from tests.envs.harbor.conftest import write_task
from tests.envs.harbor.test_convert import old_task


@pytest.fixture(autouse=True)
def _tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are run in the tests of what is called; here they are said to have been."""

    async def check_tasks(
        tasks: dict[str, Path], *, on_check: Callable[[TaskCheck], None], **_: object
    ) -> Sequence[TaskCheck]:
        full, nothing = {"reward": 1.0}, {"tests": 0.0, "style": 0.5}
        checks = [
            TaskCheck(name, "broken", full, nothing, "why", 0.5, ("one", "two \x1b[2J"))
            if name == "bad"
            else TaskCheck(name, "sound", full, nothing, "", 0.5)
            for name in tasks
        ]
        for check in checks:
            on_check(check)
        return checks

    monkeypatch.setattr("rlkit.envs.harbor.checking.check_tasks", check_tasks)
    for name in ("good", "bad"):
        write_task(tmp_path / "tasks" / name)


def test_sound_tasks_are_listed_with_exit_code_0(rlkit: Callable[..., Any]) -> None:
    result = rlkit("tasks", "check", "tasks", "--task-id", "good")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1].split() == ["good", "sound", "1", "0/0.5", "0.5"]
    assert result.stderr == "good: sound\n"


def test_broken_task_is_listed_with_a_reason_and_exit_code_1(rlkit: Callable[..., Any]) -> None:
    result = rlkit("tasks", "check", "tasks", "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert record["ok"] is False
    assert {task["task_id"]: (task["finding"], task["detail"]) for task in record["tasks"]} == {
        "good": ("sound", ""),
        "bad": ("broken", "why"),
    }
    assert [task["output"] for task in record["tasks"] if task["task_id"] == "bad"] == [["one", "two \x1b[2J"]]
    lines = rlkit("tasks", "check", "tasks").stdout.splitlines()
    assert [line.strip() for line in lines[-3:] if "|" in line] == ["| one", "| two ?[2J"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "DIR: there is no folder"),
        (["tasks", "--task-id", "goood"], "task_ids: no task matches 'goood'. Similar: good"),
        (["tasks", "--environment", "dokker"], "Did you mean 'docker'?"),
        (["tasks", "--environment-kwargs", "memory=1"], "Did you mean 'memory_mb'?"),
    ],
)
def test_invalid_check_is_exit_code_2(arguments: list[str], message: str, rlkit: Callable[..., Any]) -> None:
    result = rlkit("tasks", "check", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_old_tasks_are_converted_and_listed(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    old_task(tmp_path / "old" / "answer")
    result = rlkit("tasks", "convert", "old", "--to", "new")
    assert (result.exit_code, result.stdout) == (0, f"made    {tmp_path / 'new' / 'answer'}\n")
    again = rlkit("tasks", "convert", "old", "--to", "new", "--json")
    assert again.exit_code == 1
    assert "already exists" in json.loads(again.stdout)["failed"]["answer"]


def test_differences_of_a_converted_task_are_listed_below_it(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (old_task(tmp_path / "old" / "answer") / "solution.yaml").write_text("- command: echo\n")
    created_line, difference = rlkit("tasks", "convert", "old", "--to", "new").stdout.splitlines()
    assert created_line == f"made    {tmp_path / 'new' / 'answer'}"
    assert difference.strip().startswith("its solution (solution.yaml) is keystrokes, which cannot be replayed")
    record = json.loads(rlkit("tasks", "convert", "old", "--to", "newer", "--json").stdout)
    assert record["differences"] == {"answer": [difference.strip()]}


def test_redteam_lists_cheats_with_exit_code_1_if_one_earns(
    rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials are run in the tests of the red team; here they are said to have been."""
    paid = 1.0

    async def attack_tasks(tasks: dict[str, Path], **_: object) -> RedTeamReport:
        results = [
            ("daemon", "Leaves a daemon.", classify_attempt(paid, 0.0), paid, ""),
            ("clock", "Sets the clock.", "not tried", None, "refused"),
        ]
        return RedTeamReport(
            [
                Attempt(cheat, does, name, result, reward, 0.0, why)  # type: ignore[arg-type]
                for cheat, does, result, reward, why in results
                for name in tasks
            ],
            {},
        )

    monkeypatch.setattr("rlkit.redteam.task_attacks.attack_tasks", attack_tasks)
    result = rlkit("tasks", "check", "tasks", "--redteam")
    assert result.exit_code == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["daemon", "earned", "1", "0", "earned", "on", "bad,", "good"] in lines
    assert "clock   not tried       -       0  not tried on bad, good: refused" in result.stdout
    assert lines[-1][:4] == ["2", "cheats:", "1", "earned"]
    record = json.loads(rlkit("tasks", "check", "tasks", "--redteam", "--json").stdout)
    assert (record["ok"], len(record["attempts"])) == (False, 4)
    paid = 0.0
    assert rlkit("tasks", "check", "tasks", "--redteam").exit_code == 0


def test_small_tasks_are_generated_into_a_new_folder(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    result = rlkit("tasks", "generate", "--to", "new", "--variants", "2", "--held-out", "1")
    assert (result.exit_code, result.stdout) == (0, "wrote 39 tasks to new\n")
    assert (tmp_path / "new" / "held-out" / "1-make-folder-00" / "task.toml").is_file()
    again = rlkit("tasks", "generate", "--to", "new")
    assert again.exit_code == 2
    assert "exists and is not empty; choose another folder" in again.stderr
    refused = rlkit("tasks", "generate", "--to", "/proc/new")
    assert refused.exit_code == 2
    assert "--to: /proc/new cannot be written" in refused.stderr
    result = rlkit("tasks", "generate", "--to", "more", "--seed", "1", "--json")
    assert json.loads(result.stdout) == {"folder": "more", "tasks": 13 * 16}
