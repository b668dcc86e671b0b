"""The cheats against tasks of Harbor's. All of them on all examples with RLKIT_TEST_EXHAUSTIVE=1, as `.ci/run` does."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rlkit._util import threads
from rlkit.envs.harbor.generated.file_tasks import FileTasksSettings
from rlkit.envs.harbor.generated.task_folders import write_file_tasks
from rlkit.envs.harbor.settings import make_environment
from rlkit.envs.harbor.tasks import find_tasks
from rlkit.redteam.report import RedTeamReport
from rlkit.redteam.task_attacks import TASK_CHEATS, attack_tasks
from rlkit.redteam.task_cheat import TaskCheat
from tests.envs.harbor.conftest import write_task
from tests.envs.harbor.environments import WithoutView
from tests.marks import split_slow

pytestmark = [
    pytest.mark.usefixtures("can_sandbox", "cache"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
EXHAUSTIVE = os.environ.get("RLKIT_TEST_EXHAUSTIVE") == "1"

QUICK: Mapping[str, Sequence[str]] = {
    "hello-world": (
        "reward-daemon", "tests-daemon", "reward-through-proc", "verifier-stopped", "logs-folder-linked",
        "program-replaced-bash", "shim-tools", "ld-preload",
    ),
    "edit-config": ("outputs-linked-to-tests", "tests-read-daemon"),
    "fix-a-bug": ("exit-at-import", "always-equal", "sitecustomize"),
    "first-words": ("agent-record-forged",),
    "sales-report": ("outputs-form-without-content",),
}  # fmt: skip
"""Cheats that earned a reward before verification was sealed and tests were mended, where they did."""

WRONG = "#!/bin/bash\necho 0 > /logs/verifier/reward.txt\n"


def attack(
    folder: Path, *names: str, cheats: Sequence[TaskCheat] = TASK_CHEATS, task_ids: str = "", place: str = "local"
) -> RedTeamReport:
    tasks = {name: path for name, path in find_tasks(folder).items() if not task_ids or name == task_ids}
    chosen = [cheat for cheat in cheats if not names or cheat.name in names]
    return threads.run(attack_tasks(tasks, environment=make_environment(place), jobs=3, cheats=chosen))


@pytest.mark.parametrize("task_id", split_slow(QUICK, lambda task_id: task_id in list(QUICK)[::2]))
def test_what_once_earned_a_reward_in_an_example_earns_none(task_id: str) -> None:
    report = attack(EXAMPLES, *QUICK[task_id], task_ids=task_id)
    assert report.skipped_tasks == {}
    assert [(attempt.cheat, attempt.reward) for attempt in report.exploits] == []
    assert {attempt.cheat for attempt in report.attempts} == set(QUICK[task_id])


@pytest.mark.skipif(not EXHAUSTIVE, reason="takes minutes; set RLKIT_TEST_EXHAUSTIVE=1")
@pytest.mark.rotated
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("task_id", sorted(path.name for path in EXAMPLES.iterdir()))
def test_no_cheat_earns_a_reward_in_any_example(task_id: str) -> None:
    report = attack(EXAMPLES, task_ids=task_id)
    assert report.skipped_tasks == {}
    assert [(attempt.cheat, attempt.reward) for attempt in report.exploits] == []
    assert len(report.attempts) == len(TASK_CHEATS)


def test_what_once_earned_a_reward_earns_none_in_a_generated_task(tmp_path: Path) -> None:
    write_file_tasks(FileTasksSettings(variants=1, held_out=1), tmp_path / "tasks")
    names = (*QUICK["hello-world"], *QUICK["edit-config"])
    report = attack(tmp_path / "tasks", *names, task_ids="train/1-copy-file-00")
    assert report.skipped_tasks == {}
    assert [(attempt.cheat, attempt.reward) for attempt in report.exploits] == []
    assert {attempt.cheat for attempt in report.attempts} == set(names)


@pytest.mark.skipif(not EXHAUSTIVE, reason="takes minutes; set RLKIT_TEST_EXHAUSTIVE=1")
@pytest.mark.rotated
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["1-copy-file", "1-delete-file", "3-two-commands"])
def test_no_cheat_earns_a_reward_in_a_generated_task(kind: str, tmp_path: Path) -> None:
    write_file_tasks(FileTasksSettings(variants=1, held_out=1), tmp_path / "tasks")
    report = attack(tmp_path / "tasks", task_ids=f"train/{kind}-00")
    assert report.skipped_tasks == {}
    assert [(attempt.cheat, attempt.reward) for attempt in report.exploits] == []
    assert len(report.attempts) == len(TASK_CHEATS)


@pytest.mark.skipif(not EXHAUSTIVE, reason="takes minutes; set RLKIT_TEST_EXHAUSTIVE=1")
@pytest.mark.rotated
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("task_id", ["hello-world", "sales-report"])
def test_where_there_is_no_view_what_runs_on_earns_nothing(task_id: str) -> None:
    cheats = [cheat for cheat in TASK_CHEATS if cheat.seal in ("view", "record", "kernel")]
    report = attack(EXAMPLES, cheats=cheats, task_ids=task_id, place=f"{WithoutView.__module__}:WithoutView")
    assert report.skipped_tasks == {}
    assert [(attempt.cheat, attempt.reward) for attempt in report.exploits] == []


def test_a_disk_that_is_full_earns_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        monkeypatch.setenv("RLKIT_CACHE_DIR", str(disk))
        report = attack(EXAMPLES, "disk-filled", task_ids="hello-world")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    (attempt,) = report.attempts
    assert attempt.result in ("failed", "nothing"), "it was tried, and has earned nothing"


def test_cheats_that_pay_are_named_and_those_that_cannot_be_tried_say_why(tmp_path: Path) -> None:
    test = "#!/bin/bash\nif [ -f /app/out ]; then echo 0.5; else echo 0.25; fi > /logs/verifier/reward.txt\n"
    write_task(tmp_path / "lax", test=test)
    cheats = [
        TaskCheat("any-output", "Writes anything.", "touch out\n"),
        TaskCheat("no-output", "Writes nothing.", ":\n"),
        TaskCheat("no-tool", "Needs a tool.", "need no-such-tool\n"),
        TaskCheat("broken", "Is a broken script.", "echo the reason >&2; exit 3\n"),
    ]
    report = attack(tmp_path, cheats=cheats)
    assert not report.ok
    assert {attempt.cheat: (attempt.result, attempt.reward) for attempt in report.attempts} == {
        "any-output": ("earned", 0.5),
        "no-output": ("nothing", 0.25),
        "no-tool": ("not tried", None),
        "broken": ("not tried", None),
    }
    details = {attempt.cheat: attempt.detail for attempt in report.attempts}
    assert details["no-tool"] == "the environment has no no-such-tool"
    assert details["broken"] == "its script ended with exit code 3: the reason"
    assert all(attempt.honest_reward == 0.25 for attempt in report.attempts)


def test_a_cheat_that_breaks_the_tests_has_failed_and_earned_nothing(tmp_path: Path) -> None:
    write_task(tmp_path / "fragile", test="#!/bin/bash\n[ -f /app/out ] || echo 0 > /logs/verifier/reward.txt\n")
    report = attack(tmp_path, cheats=[TaskCheat("breaks-tests", "Breaks the tests.", "touch out\n")])
    (attempt,) = report.attempts
    assert (attempt.result, attempt.reward) == ("failed", None)
    assert "RewardFileNotFoundError" in attempt.detail
    assert report.ok


def test_a_task_without_an_honest_reward_cannot_be_attacked(tmp_path: Path) -> None:
    write_task(tmp_path / "silent", test="#!/bin/bash\n")
    write_task(tmp_path / "torn")
    (tmp_path / "torn" / "task.toml").write_text("[agent\n")
    report = attack(tmp_path, "early-reward")
    assert not report.ok
    assert report.attempts == []
    assert report.skipped_tasks["silent"].startswith("an honest empty attempt gets no reward: RewardFileNotFoundError")
    assert "torn" in report.skipped_tasks


def test_a_task_that_does_not_say_what_is_tested_is_named_for_its_programs(tmp_path: Path) -> None:
    write_task(tmp_path / "open", test=WRONG)
    report = attack(tmp_path, "program-replaced-bash", "reward-daemon")
    assert [attempt.cheat for attempt in report.exploits] == ["program-replaced-bash"]
    shutil.rmtree(tmp_path / "open")
    write_task(tmp_path / "closed", test=WRONG, settings='[metadata.rlkit]\ntested_folders = ["/app"]\n')
    assert attack(tmp_path, "program-replaced-bash").exploits == []
