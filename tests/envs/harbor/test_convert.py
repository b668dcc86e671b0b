from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rlkit._util import threads
from rlkit.envs.harbor.checking import check_tasks
from rlkit.envs.harbor.settings import make_environment
from rlkit.envs.harbor.tasks import find_tasks
from rlkit.envs.harbor.terminal_bench.convert import convert
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


# Ends as pytest does, and with an exit code that says nothing.
CHECK = """echo "========= short test summary info ========="
if [ "$(cat /app/answer)" = 42 ]; then
  echo "PASSED test_outputs.py::test_answer"
else
  echo "FAILED test_outputs.py::test_answer - assert"
fi
"""


def old_task(folder: Path) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text("instruction: Write 42 to answer.\nmax_agent_timeout_sec: 30.0\n")
    (folder / "docker-compose.yaml").write_text(COMPOSE)
    (folder / "Dockerfile").write_text("FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624\nWORKDIR /app\n")
    (folder / "solution.sh").write_text("#!/bin/bash\necho 42 > /app/answer\n")
    (folder / "run-tests.sh").write_text("#!/bin/bash\nbash $TEST_DIR/check.sh\n")
    (folder / "tests" / "check.sh").write_text(CHECK)
    return folder


@pytest.mark.usefixtures("can_sandbox")
@pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning")
def test_a_task_of_terminal_bench_1_becomes_one_that_is_sound(cache: Path, tmp_path: Path) -> None:
    done = convert(old_task(tmp_path / "old" / "answer"), tmp_path / "new")
    assert (list(done.folders), dict(done.failed)) == ([tmp_path / "new" / "answer"], {})
    (checked,) = threads.run(check_tasks(find_tasks(tmp_path / "new"), environment=make_environment("local"), jobs=1))
    assert (checked.finding, checked.solution_rewards, checked.no_op_rewards) == (
        "sound",
        {"reward": 1.0},
        {"reward": 0.0},
    )


def test_each_task_of_a_folder_is_converted_or_rejected_with_a_reason(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old_task(old / "good")
    (old_task(old / "bad") / "tests" / "test.sh").write_text("")
    compose = (old_task(old / "imageless") / "docker-compose.yaml").read_text()
    (old / "imageless" / "docker-compose.yaml").write_text(compose.replace("build: {dockerfile: Dockerfile}", ""))
    (old / "imageless" / "Dockerfile").unlink()
    (old / "notes").mkdir()
    done = convert(old, tmp_path / "new")
    assert [path.name for path in done.folders] == ["good"]
    assert done.failed == {
        "bad": "its tests have a test.sh, but Harbor needs this name",
        "imageless": "it has no Dockerfile in the build context of its docker-compose.yaml",
    }
    assert done.differences == {}


def test_an_inconvertible_task_is_a_one_line_error_and_leaves_nothing(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old_task(old / "torn") / "task.yaml").write_text(": [\n")
    (old_task(old / "half") / "docker-compose.yaml").unlink()
    (new / "torn").mkdir(parents=True)
    done = convert(old, new)
    assert sorted(done.failed) == ["half", "torn"]
    assert [len(why.splitlines()) for why in done.failed.values()] == [1, 1]
    assert [path.name for path in new.iterdir()] == ["torn"]  # which was there before


@pytest.mark.parametrize("service", ["client", "database"])
@pytest.mark.parametrize(
    "build",
    [
        "{context: HOME/.ssh}",
        "HOME/.ssh",
        "../../home/.ssh",
        "{context: data/../../../home/.ssh}",
        "{context: ../answer/data}",
        "{context: linked}",
        "linked/.ssh",
        '"${HOME}/.ssh"',
        "~/.ssh",
        '"data\\0"',
        "{context: data, dockerfile: ../../../home/.ssh/id_rsa}",
        "{dockerfile: HOME/.ssh/id_rsa}",
    ],
)
def test_a_build_context_outside_of_a_task_is_rejected(tmp_path: Path, service: str, build: str) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_rsa").write_text("key")
    old = old_task(tmp_path / "old" / "answer")
    (old / "data").mkdir()
    (old / "linked").symlink_to(home)
    build = build.replace("HOME/", f"{home}/")
    compose = f"{COMPOSE}  database: {{image: postgres}}\n"
    within = ("build: {dockerfile: Dockerfile}", "{image: postgres}")[service == "database"]
    setting = f"build: {build}" if service == "client" else f"{{build: {build}}}"
    (old / "docker-compose.yaml").write_text(compose.replace(within, setting))
    done = convert(old, tmp_path / "new")
    assert list(done.failed) == ["answer"]
    kind = "dockerfile" if "dockerfile" in build else "build context"
    assert done.failed["answer"].startswith(f"the {kind} of its service '{service}' leads out of its folder: '")
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("build", ["./app", "{context: app}", "{context: tests/../app, dockerfile: ../app/Dockerfile}"])
def test_a_build_context_within_a_task_is_copied(tmp_path: Path, build: str) -> None:
    old = old_task(tmp_path / "old" / "answer")
    (old / "app").mkdir()
    (old / "Dockerfile").rename(old / "app" / "Dockerfile")
    (old / "app" / "data").write_text("rows")
    (old / "docker-compose.yaml").write_text(COMPOSE.replace("{dockerfile: Dockerfile}", build))
    assert not convert(old, tmp_path / "new").failed
    assert (tmp_path / "new" / "answer" / "environment" / "data").read_text() == "rows"


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("task.yaml", b'instruction: Do it.\nparser_name: "py', "task.yaml, line 2: is not YAML: found unexpected end"),
        ("task.yaml", b"", "task.yaml: must be a mapping of settings, not NoneType"),
        ("task.yaml", b"- a\n", "task.yaml: must be a mapping of settings, not list"),
        ("task.yaml", b"\xff\xfe", "task.yaml is not UTF-8 text"),
        ("task.yaml", b"instruction: \x00\n", "task.yaml: is not YAML: unacceptable character"),
        ("task.yaml", b"[" * 10_000, "task.yaml: is not YAML: maximum recursion depth"),
        (
            "task.yaml",
            b"max_test_timeout_sec: soon\n",
            "task.yaml: instruction: Field required; max_test_timeout_sec: ",
        ),
        ("docker-compose.yaml", None, "docker-compose.yaml cannot be read: No such file or directory"),
        ("docker-compose.yaml", b"services: [a\n", "docker-compose.yaml, line 2: is not YAML: expected ',' or ']'"),
        ("docker-compose.yaml", b"services: a\n", "docker-compose.yaml: services: must be a mapping from names"),
        ("docker-compose.yaml", b"services: {a: b}\n", "docker-compose.yaml: services: must be a mapping from names"),
        ("run-tests.sh", None, "it has no run-tests.sh"),
    ],
)
def test_an_unreadable_file_is_named_with_the_reason(
    tmp_path: Path, file: str, content: bytes | None, reason: str
) -> None:
    old = old_task(tmp_path / "old")
    (old / file).unlink()
    if content is not None:
        (old / file).write_bytes(content)
    done = convert(old, tmp_path / "new")
    assert (list(done.folders), list((tmp_path / "new").iterdir())) == ([], [])
    (why,) = done.failed.values()
    assert why.startswith(reason)
    assert len(why.splitlines()) == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("a-file", "--to: .*a-file is or lies in a file; choose another folder"),
        ("a-file/new", "--to: .*a-file/new is or lies in a file; choose another folder"),
        ("/proc/new", "--to: /proc/new cannot be written: No such file or directory; choose another folder"),
    ],
)
def test_an_unwritable_target_is_rejected_before_converting(tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "a-file").touch()
    with pytest.raises(UsageError, match=message):
        convert(old_task(tmp_path / "old"), tmp_path / target)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("none", "new", "none is not a folder"),
        ("empty", "new", "has a task.yaml"),
        ("old", "old/new", "is inside"),
    ],
)
def test_inconvertible_sources_are_errors(tmp_path: Path, source: str, target: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    old_task(tmp_path / "old" / "answer")
    with pytest.raises(UsageError, match=message):
        convert(tmp_path / source, tmp_path / target)


def verdict(old: Path, output: str, *, code: int = 0) -> str:
    """Run the converted tests of a task whose own tests print `output`; the reward that they write."""
    (old / "tests" / "output").write_text(output)
    (old / "run-tests.sh").write_text(f"set -e\ncat $TEST_DIR/output\nexit {code}\n")
    new = old.parent / "new"
    shutil.rmtree(new, ignore_errors=True)
    assert not convert(old, new).failed
    tests, logs = new / old.name / "tests", new / "logs"
    script = (tests / "test.sh").read_text().replace("/logs/", f"{logs}/").replace("=/tests", f"={tests}")
    done = subprocess.run(
        ["bash"], check=False, input=script.replace("bash /tests", f"bash {tests}"), text=True, capture_output=True
    )
    assert (done.returncode, done.stdout) == (code, output)
    assert [path.name for path in (logs / "verifier").iterdir()] == ["reward.txt"]
    return (logs / "verifier" / "reward.txt").read_text().strip()


SUMMARY = "=========================== short test summary info ============================\n"


@pytest.mark.parametrize(
    ("output", "code", "reward"),
    [
        (f"1 passed\n{SUMMARY}PASSED a.py::test_a\nSKIPPED [1] a.py:3: slow\n", 1, "1"),
        (f"{SUMMARY}PASSED a.py::test_a\nFAILED a.py::test_b - assert 1 == 2\n", 0, "0"),
        (f"{SUMMARY}PASSED a.py::test_a\nERROR a.py - ImportError\n", 0, "0"),
        (f"FAILED before\n\x1b[36m{SUMMARY}\x1b[32mPASSED\x1b[0m a.py::\x1b[1mtest_a\x1b[0m\n", 0, "1"),
        (f"{SUMMARY}XPASS a.py::test_a", 0, "0"),
        (f"{SUMMARY}", 0, "0"),
        ("PASSED a.py::test_a\n", 0, "0"),
    ],
)
def test_the_pytest_summary_decides_whether_a_task_is_solved(
    tmp_path: Path, output: str, code: int, reward: str
) -> None:
    assert verdict(old_task(tmp_path / "answer"), output, code=code) == reward


def test_the_exit_code_decides_with_another_parser(tmp_path: Path) -> None:
    old = old_task(tmp_path / "answer")
    (old / "task.yaml").write_text("instruction: Mend it.\nparser_name: swebench\n")
    assert [verdict(old, "", code=code) for code in (0, 2)] == ["1", "0"]


def test_inexact_conversions_are_listed_with_their_task(tmp_path: Path) -> None:
    old = tmp_path / "old"
    settings = old_task(old / "settings") / "task.yaml"
    settings.write_text("instruction: Do it.\nparser_name: sweperf\nrun_tests_in_same_shell: true\n")
    (old_task(old / "keystrokes") / "solution.yaml").write_text("- command: true\n")
    services = old_task(old / "services") / "docker-compose.yaml"
    services.write_text(
        f"{COMPOSE}    privileged: true\n    volumes: [./data:/data]\n  database: {{image: postgres}}\n"
    )
    privileged = old_task(old / "privileged") / "docker-compose.yaml"
    privileged.write_text(f"{COMPOSE}    privileged: true\n")
    daemon = old_task(old / "daemon") / "docker-compose.yaml"
    daemon.write_text(COMPOSE.replace("sleep infinity", "cron && sleep infinity") + "    entrypoint: [/start]\n")
    old_task(old / "exact")
    done = convert(old, tmp_path / "new")
    assert (len(done.folders), done.failed) == (6, {})
    assert {name: list(lines) for name, lines in done.differences.items()} == {
        "daemon": [
            "its entrypoint needs a container engine: set environment to docker; local does not support it",
            "its container ran `sh -c cron && sleep infinity`; here nothing runs before the agent",
        ],
        "keystrokes": [
            "its solution (solution.yaml) is keystrokes, which cannot be replayed: `rlkit tasks check` finds none"
        ],
        "privileged": [
            "its docker-compose.yaml needs a container engine: set environment to docker; local does not support it"
        ],
        "services": [
            "its services (database) of docker-compose.yaml need a container engine: set environment to docker; "
            "local does not support it",
            "its volumes (./data:/data) are not mounted",
        ],
        "settings": [
            "the parser sweperf determined the result of its tests; here their exit code does",
            "its tests ran in the agent's shell; here they run in a separate shell, without its variables",
        ],
    }
