"""An agent cannot forge its reward with anything that it leaves behind."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import pytest

from rlkit.envs.harbor.tasks import find_task_fault
from rlkit.envs.harbor.verification.sealing import TestedWork, describe_seal
from rlkit.errors import UsageError

from .agents import Shell
from .conftest import SETTINGS, write_task
from .environments import WithoutView
from .verdicts import trial_verdict

EXAMPLES = Path(__file__).parents[3] / "examples" / "tasks"
PLACES = ["local", f"{WithoutView.__module__}:WithoutView"]
pytestmark = [
    pytest.mark.usefixtures("can_sandbox"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]


def daemon(script: str) -> str:
    """A command that leaves a loop running."""
    return f"(setsid nohup sh -c 'while :; do {script}; sleep 0.01; done' > /dev/null 2>&1 &)"


def rewards_of(task: Path, command: str, *, place: str = "local", repeats: int = 1) -> list[object]:
    """The verdicts on an agent that runs one command."""
    agent = {"import_path": f"{Shell.__module__}:Shell", "kwargs": {"command": command}}

    async def main() -> list[object]:
        return [await trial_verdict(task, agent=agent, place=place) for _ in range(repeats)]

    return asyncio.run(main())


FORGERIES = {
    "an early reward": "mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "a daemon that writes rewards": daemon(
        'echo "{\\"reward\\": 1}" > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt'
    ),
    "a daemon that rewrites tests": daemon(
        'for f in /tests/*.sh; do printf "#!/bin/bash\\necho 1 > /logs/verifier/reward.txt\\n" > $f; done'
    ),
    "a daemon that enters the verifier": daemon(
        "for p in /proc/[0-9]*; do echo 1 > $p/root/logs/verifier/reward.json; done"
    ),
    "a daemon whose first thread has ended": "cat > /app/d.py <<'END'\nimport ctypes, threading, time\ndef work():\n"
    "    while True:\n        try: open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')\n"
    "        except OSError: pass\n        time.sleep(0.002)\n"
    "threading.Thread(target=work).start()\nctypes.CDLL(None).syscall(60, 0)\nEND\n"
    "(setsid nohup python3 /app/d.py > /dev/null 2>&1 &)",
    "a chain of forks": "cat > /app/d.py <<'END'\nimport os\nwhile True:\n    if os.fork():\n        os._exit(0)\n"
    "    try: open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')\n    except OSError: pass\nEND\n"
    "(setsid nohup python3 /app/d.py > /dev/null 2>&1 &)",
    "links in the place of folders": "mkdir -p /app/v; echo 1 > /app/v/reward.json; rm -rf /logs/verifier /tests; "
    "mkdir -p /logs; ln -s /app/v /logs/verifier; ln -s /app /tests",
    "a link in the place of all logs": "mkdir -p /app/verifier; echo 1 > /app/verifier/reward.json; rm -rf /logs; "
    "ln -s /app /logs",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FORGERIES)
def test_a_reward_cannot_be_forged_by(cache: Path, name: str, place: str) -> None:
    assert rewards_of(EXAMPLES / "hello-world", FORGERIES[name], place=place) == [{"reward": 0.0}]


@pytest.mark.parametrize("place", PLACES)
def test_work_counts_despite_a_forger_process(cache: Path, place: str) -> None:
    command = "echo 'Hello, world!' > /app/hello.txt; " + FORGERIES["a daemon that rewrites tests"]
    assert rewards_of(EXAMPLES / "hello-world", command, place=place) == [{"reward": 1.0}]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("leaves", ["once", "a daemon"])
def test_the_record_of_an_agent_outside_of_the_sandbox_cannot_be_forged(cache: Path, leaves: str, place: str) -> None:
    """`first-words` pays for what the record says that the agent has said."""
    forged_record = '{"steps": [{"source": "agent", "tool_calls": [1]}]}'
    forge = f"mkdir -p /logs/agent; echo {shlex.quote(forged_record)} > /logs/agent/trajectory.json"
    script = f"echo {shlex.quote(forged_record)} > /forged; "
    command = forge if leaves == "once" else script + daemon("cp /forged /logs/agent/trajectory.json")
    honest = rewards_of(EXAMPLES / "first-words", "true", place=place)
    assert honest[0]["reward"] < 0.5  # type: ignore[index]
    assert rewards_of(EXAMPLES / "first-words", command, place=place) == honest


def test_a_server_that_is_part_of_the_work_keeps_running(cache: Path) -> None:
    solution = (EXAMPLES / "background-server" / "solution" / "solve.sh").read_text()
    for place in PLACES:
        assert rewards_of(EXAMPLES / "background-server", solution, place=place) == [{"reward": 1.0}]


def test_without_a_view_processes_end_unless_the_task_declares_them_tested(cache: Path, tmp_path: Path) -> None:
    test = '#!/bin/bash\n{ kill -0 "$(cat /app/pid)" && echo 1 || echo 0; } > /logs/verifier/reward.txt\n'
    left = "nohup sleep 3600 > /dev/null 2>&1 & echo $! > /app/pid"
    task_without_view = write_task(tmp_path / "ended", test=test)
    tested = write_task(tmp_path / "tested", test=test)
    text = SETTINGS.replace("[metadata]", "[metadata]\n[metadata.rlkit]\ntested_processes = true")
    (tested / "task.toml").write_text(text)
    assert rewards_of(task_without_view, left, place="local") == [{"reward": 1.0}]
    assert rewards_of(task_without_view, left, place=PLACES[1]) == [{"reward": 0.0}]
    assert rewards_of(tested, left, place=PLACES[1]) == [{"reward": 1.0}]


@pytest.mark.parametrize("place", PLACES)
def test_processes_of_the_agent_pause_between_steps_and_continue(cache: Path, tmp_path: Path, place: str) -> None:
    """The first step's reward is sealed, and the second step's work was begun in the first."""
    task = tmp_path / "task"
    for step in ("one", "two"):
        (task / "steps" / step / "tests").mkdir(parents=True)
        (task / "steps" / step / "instruction.md").write_text("Work.")
    (task / "environment").mkdir()
    (task / "environment" / "Dockerfile").write_text("FROM x\nWORKDIR /app\n")
    steps = '\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    (task / "task.toml").write_text('multi_step_reward_strategy = "mean"\n' + SETTINGS + steps)
    forged = "#!/bin/bash\nsleep 0.2; [ -e /logs/verifier/reward.json ] || echo 0 > /logs/verifier/reward.txt\n"
    (task / "steps" / "one" / "tests" / "test.sh").write_text(forged)
    alive = "#!/bin/bash\nif [ $(cat /app/ticks | wc -l) -gt $(cat /app/before) ]; then echo 1; else echo 0; fi"
    (task / "steps" / "two" / "tests" / "test.sh").write_text(f"{alive} > /logs/verifier/reward.txt\n")
    begin = daemon("echo >> /app/ticks; echo 1 > /logs/verifier/reward.json")
    count = "$(cat /app/ticks | wc -l)"
    wait = f"echo {count} > /app/before; until [ {count} -gt $(cat /app/before) ]; do sleep 0.02; done"
    command = f"if [ -e /app/ticks ]; then {wait}; else {begin}; until [ -e /app/ticks ]; do sleep 0.02; done; fi"
    assert rewards_of(task, command, place=place) == [{"reward": 0.5}]


def test_named_folders_hide_the_agents_programs_and_settings_from_the_tests(cache: Path, tmp_path: Path) -> None:
    shims = (
        "for name in cat bash sh; do rm -f /usr/local/bin/$name; "
        "printf '#!/usr/bin/env -S /usr/bin/dash\\necho 1 > /logs/verifier/reward.txt; echo hello data\\n' "
        "> /usr/local/bin/$name; chmod +x /usr/local/bin/$name; done"
    )
    trusting = write_task(tmp_path / "trusting")
    sealed = write_task(tmp_path / "sealed")
    text = SETTINGS.replace("[metadata]", '[metadata]\n[metadata.rlkit]\ntested_folders = ["/app"]')
    (sealed / "task.toml").write_text(text)
    assert rewards_of(trusting, shims) == [{"reward": 1.0}]  # which is what describe_seal says
    assert rewards_of(sealed, shims) == [{"reward": 0.0}]
    assert rewards_of(
        sealed, f'cp /app/data.txt /app/x; echo "$GREETING $(cat /app/data.txt)" > /app/out; {shims}'
    ) == [{"reward": 1.0}]
    assert "tested_folders" in " ".join(describe_seal(has_view=True, work=TestedWork()))
    assert describe_seal(has_view=True, work=TestedWork(("/app",))) == ()
    assert describe_seal(has_view=True, work=TestedWork(("/user",))) == ()
    (programs,) = describe_seal(has_view=True, work=TestedWork(("/app", "/usr/local", "/etc")))
    assert "from /usr/local, /etc, which" in programs


def test_the_tests_may_run_as_another_user(cache: Path, tmp_path: Path) -> None:
    test = '#!/bin/bash\n[ "$(id -un)" = nobody ] && echo 1 > /logs/verifier/reward.txt\n'
    task = write_task(tmp_path / "task", test=test)
    (task / "task.toml").write_text(SETTINGS.replace("[verifier]", '[verifier]\nuser = "nobody"'))
    for place in PLACES:
        assert rewards_of(task, FORGERIES["a daemon that writes rewards"], place=place) == [{"reward": 1.0}]


def test_indistinguishable_processes_fail_the_trial(cache: Path) -> None:
    place = f"{WithoutView.__module__}:NotListed"
    assert rewards_of(EXAMPLES / "hello-world", "true", place=place) == ["EnvironmentFault"]


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ("tested_folder = ['/app']", "tested_folder: unknown. Did you mean 'tested_folders'"),
        ("tested_folders = '/app'", "tested_folders: Input should be a valid list"),
        ("tested_folders = ['app']", "must be absolute"),
        ("tested_folders = ['/logs']", "cannot be shared"),
        ("tested_folders = ['/app/../tests']", "without '..'"),
        ("tested_processes = 1", "tested_processes: Input should be a valid boolean"),
    ],
)
def test_an_invalid_table_is_a_broken_task(tmp_path: Path, table: str, fault: str) -> None:
    task = write_task(tmp_path / "task")
    (task / "task.toml").write_text(SETTINGS.replace("[metadata]", f"[metadata]\n[metadata.rlkit]\n{table}"))
    assert fault in (find_task_fault(task) or "")


def test_open_ends_of_an_environment_are_reported() -> None:
    assert [line.split(":")[0] for line in describe_seal(has_view=False, work=TestedWork(None, processes=True))] == [
        "the tests run programs and settings that the agent can change",
        "processes that the agent leaves running can write rewards and tests, since tested_processes is set",
    ]
    with pytest.raises(UsageError, match="tested_folders"):
        TestedWork.of({"rlkit": {"tested_folders": 3}})
