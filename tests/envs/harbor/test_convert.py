from __future__ import annotations

from pathlib import Path

import pytest

from rlkit import concurrency
from rlkit.envs.harbor.checking import check_tasks
from rlkit.envs.harbor.convert import convert
from rlkit.envs.harbor.settings import environment
from rlkit.envs.harbor.tasks import find
from rlkit.errors import UsageError

COMPOSE = """services:
  client:
    build: {dockerfile: Dockerfile}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
"""


def old_task(folder: Path) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text("instruction: Write 42 to answer.\nmax_agent_timeout_sec: 30.0\n")
    (folder / "docker-compose.yaml").write_text(COMPOSE)
    (folder / "Dockerfile").write_text("FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624\nWORKDIR /app\n")
    (folder / "solution.sh").write_text("#!/bin/bash\necho 42 > /app/answer\n")
    (folder / "run-tests.sh").write_text("#!/bin/bash\nbash $TEST_DIR/check.sh\n")
    (folder / "tests" / "check.sh").write_text('[ "$(cat /app/answer)" = 42 ]\n')
    return folder


@pytest.mark.usefixtures("can_sandbox")
@pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning")
def test_a_task_of_terminal_bench_1_becomes_one_that_is_sound(cache: Path, tmp_path: Path) -> None:
    done = convert(old_task(tmp_path / "old" / "answer"), tmp_path / "new")
    assert (list(done.made), dict(done.failed)) == ([tmp_path / "new" / "answer"], {})
    (checked,) = concurrency.run(check_tasks(find(tmp_path / "new"), environment=environment("local"), jobs=1))
    assert (checked.finding, checked.solution, checked.nothing) == ("sound", {"reward": 1.0}, {"reward": 0.0})


def test_of_a_folder_each_task_is_converted_or_told_why_not(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old_task(old / "good")
    (old_task(old / "bad") / "solution.yaml").write_text("")
    (old / "notes").mkdir()
    done = convert(old, tmp_path / "new")
    assert [path.name for path in done.made] == ["good"]
    assert list(done.failed) == ["bad"]
    assert "solution.yaml which is not supported" in done.failed["bad"]


def test_a_task_that_cannot_be_converted_is_told_in_one_line_and_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old_task(old / "torn") / "task.yaml").write_text(": [\n")
    (old_task(old / "half") / "docker-compose.yaml").unlink()
    (new / "torn").mkdir(parents=True)
    done = convert(old, new)
    assert sorted(done.failed) == ["half", "torn"]
    assert [len(why.splitlines()) for why in done.failed.values()] == [1, 1]
    assert list(done.notes) == []
    assert [path.name for path in new.iterdir()] == ["torn"]  # which was there before


@pytest.mark.parametrize(
    ("source", "target", "told"),
    [
        ("none", "new", "none is no folder"),
        ("empty", "new", "holds no task.yaml"),
        ("old", "old/new", "is inside"),
    ],
)
def test_what_cannot_be_converted_is_told(tmp_path: Path, source: str, target: str, told: str) -> None:
    (tmp_path / "empty").mkdir()
    old_task(tmp_path / "old" / "answer")
    with pytest.raises(UsageError, match=told):
        convert(tmp_path / source, tmp_path / target)
