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


def checked(folder: Path) -> dict[str, TaskCheck]:
    checks = threads.run(check_tasks(find_tasks(folder), environment=make_environment("local"), jobs=4))
    return {one.task_id: one for one in checks}


def test_the_example_tasks_are_sound(cache: Path) -> None:
    found = checked(EXAMPLES)
    assert len(found) >= 6
    assert {name: one.detail for name, one in found.items() if one.finding != "sound"} == {}
    assert left(cache) == []


def test_tasks_that_are_broken_or_solved_or_cannot_be_solved_are_told(cache: Path, tmp_path: Path) -> None:
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
    found = checked(tmp_path)
    assert {name: one.finding for name, one in found.items()} == {
        "endless": "broken",
        "odd": "broken",
        "open": "no solution",
        "silent": "broken",
        "solved": "solved",
        "torn": "broken",
        "unsolvable": "broken",
    }
    assert found["unsolvable"].detail == "its solution: does not get the full reward"
    assert "a number that is too large" in found["endless"].detail
    assert found["silent"].detail.startswith("its solution: RewardFileNotFoundError")
    assert "Dockerfile:2: VOLUME is not supported by the local sandbox" in found["odd"].detail
    assert "task.toml" in found["torn"].detail or "TOML" in found["torn"].detail
    assert found["open"].ok
    assert not found["silent"].ok


def test_an_environment_that_failed_is_no_fault_of_the_task(cache: Path, tmp_path: Path) -> None:
    write_task(tmp_path / "good")
    (one,) = threads.run(
        check_tasks(
            find_tasks(tmp_path), environment=make_environment("tests.envs.harbor.environments:SaysWhyNot", {}), jobs=1
        )
    )
    assert (one.finding, one.ok, one.solution_rewards, one.no_op_rewards) == ("environment failed", False, None, None)
    assert one.detail.startswith("its solution: RuntimeError: docker compose failed")
    assert one.output[-1] == "no space left on device"
    assert "layer 1" not in one.output
    assert len(one.detail) < 500


def test_the_last_lines_of_tests_that_fail_are_kept(cache: Path, tmp_path: Path) -> None:
    write_task(tmp_path / "noisy", test="#!/bin/bash\nseq 100\necho 'assert 1 == 2' >&2\n")
    one = checked(tmp_path)["noisy"]
    assert one.finding == "broken"
    assert "assert 1 == 2" in one.output
    assert "100" in one.output
    assert "1" not in one.output


def test_a_verdict_that_the_agent_wrote_itself_does_not_count(cache: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "hacked", test="#!/bin/bash\necho 0 > /logs/verifier/reward.txt\n")
    (task / "solution" / "solve.sh").write_text("#!/bin/bash\necho '{\"reward\": 1}' > /logs/verifier/reward.json\n")
    assert checked(tmp_path)["hacked"].solution_rewards == {"reward": 0.0}
