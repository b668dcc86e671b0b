from __future__ import annotations

from pathlib import Path

import pytest

from rlkit._util import threads
from rlkit.envs.harbor.checking import TaskCheck, check_tasks
from rlkit.envs.harbor.settings import make_environment
from rlkit.envs.harbor.tasks import find_tasks

from .conftest import left, write_task

pytestmark = [
    pytest.mark.usefixtures("can_sandbox"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]

EXAMPLES = Path(__file__).parents[3] / "examples" / "tasks"


def check_folder(folder: Path) -> dict[str, TaskCheck]:
    checks = threads.run(check_tasks(find_tasks(folder), environment=make_environment("local"), jobs=4))
    return {check.task_id: check for check in checks}


def test_the_example_tasks_are_sound(cache: Path) -> None:
    checks = check_folder(EXAMPLES)
    assert len(checks) >= 6
    assert {name: check.detail for name, check in checks.items() if check.finding != "sound"} == {}
    assert left(cache) == []


def test_broken_solved_and_unsolvable_tasks_are_reported(cache: Path, tmp_path: Path) -> None:
    write_task(tmp_path / "solved", test="#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    write_task(tmp_path / "unsolvable", test="#!/bin/bash\necho 0.5 > /logs/verifier/reward.txt\n")
    write_task(tmp_path / "silent", test="#!/bin/bash\n")
    write_task(tmp_path / "open")
    (tmp_path / "open" / "solution" / "solve.sh").unlink()
    write_task(tmp_path / "torn")
    (tmp_path / "torn" / "task.toml").write_text("[agent\n")
    many = "#!/bin/bash\nprintf '{\"reward\": 1%0400d}' 0 > /logs/verifier/reward.json\n"
    write_task(tmp_path / "endless", test=many)
    write_task(tmp_path / "odd", dockerfile="FROM x\nVOLUME /data\n")
    checks = check_folder(tmp_path)
    assert {name: check.finding for name, check in checks.items()} == {
        "endless": "broken",
        "odd": "broken",
        "open": "no solution",
        "silent": "broken",
        "solved": "solved",
        "torn": "broken",
        "unsolvable": "broken",
    }
    assert checks["unsolvable"].detail == "its solution: does not get the full reward"
    assert "a number that is too large" in checks["endless"].detail
    assert checks["silent"].detail.startswith("its solution: RewardFileNotFoundError")
    assert "Dockerfile:2: VOLUME is not supported by the local sandbox" in checks["odd"].detail
    assert "task.toml" in checks["torn"].detail or "TOML" in checks["torn"].detail
    assert checks["open"].ok
    assert not checks["silent"].ok


def test_an_environment_failure_is_not_blamed_on_the_task(cache: Path, tmp_path: Path) -> None:
    write_task(tmp_path / "good")
    (check,) = threads.run(
        check_tasks(
            find_tasks(tmp_path), environment=make_environment("tests.envs.harbor.environments:SaysWhyNot", {}), jobs=1
        )
    )
    assert (check.finding, check.ok, check.solution_rewards, check.no_op_rewards) == (
        "environment failed",
        False,
        None,
        None,
    )
    assert check.detail.startswith("its solution: RuntimeError: docker compose failed")
    assert check.output[-1] == "no space left on device"
    assert "layer 1" not in check.output
    assert len(check.detail) < 500


def test_the_last_output_lines_of_failed_tests_are_kept(cache: Path, tmp_path: Path) -> None:
    write_task(tmp_path / "noisy", test="#!/bin/bash\nseq 100\necho 'assert 1 == 2' >&2\n")
    check = check_folder(tmp_path)["noisy"]
    assert check.finding == "broken"
    assert "assert 1 == 2" in check.output
    assert "100" in check.output
    assert "1" not in check.output


def test_a_verdict_written_by_the_agent_does_not_count(cache: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "hacked", test="#!/bin/bash\necho 0 > /logs/verifier/reward.txt\n")
    (task / "solution" / "solve.sh").write_text("#!/bin/bash\necho '{\"reward\": 1}' > /logs/verifier/reward.json\n")
    assert check_folder(tmp_path)["hacked"].solution_rewards == {"reward": 0.0}
