"""Real programs, in the sandbox and without one, whose model is the policy of a rollout."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

import rlkit
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.policy import Limits as PolicyLimits
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.rollout.runner import play_env
from rlkit.sandbox import Limits
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.tools.audit import audit_run
from rlkit.types import Sampling

from ..sandbox.conftest import cache, can_sandbox, sandbox_cache

__all__ = ["cache", "can_sandbox", "sandbox_cache"]

PYTHON_FOLDERS = sorted({sys.base_prefix, sys.prefix, *(path for path in sys.path if path.endswith("site-packages"))})

AGENT = """
import openai
client = openai.OpenAI()
messages = [{"role": "user", "content": "hello"}]
for _ in range(3):
    reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
    open("answer.txt", "a").write(reply.content + ";")
print("done")
"""

ASK = """
import json, os, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
"""
"""A program that only makes a turn."""

pytestmark = pytest.mark.usefixtures("cache")


def grade_answer(result: rlkit.ProcessResult) -> rlkit.Outcome:
    answer = result.folder / "answer.txt"
    text = answer.read_text() if answer.exists() else ""
    return rlkit.Outcome(float(text.count("seen")), info={"code": result.exit_code, "error": result.stderr[-500:]})


async def grade_output(result: rlkit.ProcessResult) -> float:
    assert result.stdout == "out\n"
    return 0.25


def make_policy(max_turns: int | None = None) -> RecordingPolicy:
    sampler = ScriptedSampler(lambda prompt, seed: f"seen {len(prompt)}", chat=ByteChat())
    return RecordingPolicy(
        sampler=lambda: sampler,
        chat=ByteChat(),
        sampling=Sampling(max_tokens=50),
        seed=lambda turn: turn,
        limits=PolicyLimits(max_turns),
    )


def make_env(
    *argv: str, sandbox: bool, grade: object = grade_answer, timeout_s: float = 60.0, **files: str
) -> rlkit.ProcessEnv:
    return rlkit.ProcessEnv(
        argv=argv,
        grade=grade,  # type: ignore[arg-type]
        files={"ask.py": ASK, **{name.replace("_", "."): text for name, text in files.items()}},
        sandbox=sandbox,
        host_folders=PYTHON_FOLDERS if sandbox else (),
        timeout_s=timeout_s,
    )


def play(env: rlkit.Env, policy: RecordingPolicy | None = None) -> rlkit.Outcome:
    outcome, error = asyncio.run(play_env(env, policy or make_policy(), timeout_s=120))
    if outcome is None:
        raise EnvironmentFault(error)
    return outcome


@pytest.fixture(params=[True, False], ids=["sandbox", "host"])
def sandbox(request: pytest.FixtureRequest) -> bool:
    if request.param:
        request.getfixturevalue("can_sandbox")
    return bool(request.param)


def test_a_program_is_played_and_graded_by_its_files(sandbox: bool) -> None:
    policy = make_policy()
    outcome = play(make_env(sys.executable, "agent.py", sandbox=sandbox, agent_py=AGENT), policy)
    assert outcome == rlkit.Outcome(3.0, info={"code": 0, "error": ""})
    assert [turn.parent for turn in policy.turns] == [None, 0, 1]  # a conversation, token for token


def test_a_program_that_runs_out_of_turns_is_graded_and_truncated(sandbox: bool) -> None:
    outcome = play(make_env(sys.executable, "agent.py", sandbox=sandbox, agent_py=AGENT), make_policy(2))
    assert (outcome.reward, outcome.truncated, outcome.info["code"]) == (2.0, True, 1)
    assert "rollout_limit_reached" in str(outcome.info["error"])


def test_a_program_that_is_killed_at_its_time_limit_is_graded_and_truncated(sandbox: bool, tmp_path: Path) -> None:
    script = "#!/bin/sh\npython3 ask.py; echo seen > answer.txt; sleep 3217 & sleep 3217"
    outcome = play(make_env("./run.sh", sandbox=sandbox, timeout_s=5, run_sh=script))
    assert (outcome.reward, outcome.truncated, outcome.info["code"]) == (1.0, True, None)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"3217" in read(path)]


def test_output_is_kept_up_to_its_limit_and_a_coroutine_may_grade(sandbox: bool) -> None:
    env = make_env(
        "sh", "-c", "python3 ask.py; echo out; head -c 5000000 /dev/zero >&2", sandbox=sandbox, grade=grade_output
    )
    assert play(env).reward == 0.25


def test_a_signal_is_an_exit_code(sandbox: bool) -> None:
    assert play(make_env("sh", "-c", "python3 ask.py; kill -9 $$", sandbox=sandbox)).info["code"] == 137


@pytest.mark.parametrize(
    ("script", "ending"),
    [
        ("echo broken >&2; exit 3", "exit code 3.: broken"),
        pytest.param("kill -9 $$", "exit code 137.: no stderr", marks=pytest.mark.slow),
        pytest.param("echo fine", "exit code 0.: no stderr", marks=pytest.mark.slow),
        ("echo late >&2; sleep 99", "time limit.: late"),
    ],
)
def test_a_program_without_a_turn_fails_the_episode(sandbox: bool, script: str, ending: str) -> None:
    with pytest.raises(EnvironmentFault, match=f"the program ended without a reply of its model .{ending}$"):
        play(make_env("sh", "-c", script, sandbox=sandbox, timeout_s=5 if "late" in script else 60))


def test_a_program_whose_first_request_meets_a_limit_is_graded(sandbox: bool) -> None:
    outcome = play(make_env("python3", "ask.py", sandbox=sandbox), make_policy(0))
    assert (outcome.reward, outcome.truncated, outcome.info["code"]) == (0.0, True, 1)


def test_a_program_that_cannot_start_fails_the_episode(sandbox: bool) -> None:
    with pytest.raises(EnvironmentFault, match=r"argv: No such file or directory: .*no-such-program"):
        play(make_env("no-such-program", sandbox=sandbox))


def test_a_program_without_a_sandbox_gets_no_keys_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "secret")

    def grade(result: rlkit.ProcessResult) -> float:
        variables = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
        assert "TINKER_API_KEY" not in variables
        assert variables["OPENAI_API_KEY"] == variables["ANTHROPIC_API_KEY"] != os.environ.get("OPENAI_API_KEY")
        assert variables["WORD"] == "a b"
        return 1.0

    argv, files = ["sh", "-c", "python3 ask.py; env"], {"ask.py": ASK}
    env = rlkit.ProcessEnv(argv=argv, grade=grade, files=files, variables={"WORD": "a b"}, sandbox=False)
    assert play(env).reward == 1.0


@pytest.mark.slow
def test_deep_folders_of_a_program_are_removed(sandbox: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = ASK + "\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\nos.mkdir(b'\\xff -rf', 0)"
    assert play(make_env("python3", "-c", program, sandbox=sandbox, grade=lambda result: 1.0)).reward == 1.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("replacement", ["", "; touch $OLDPWD", "; ln -s /no-such-folder $OLDPWD"])
def test_a_folder_that_its_program_removes_is_graded_as_an_empty_one(sandbox: bool, replacement: str) -> None:
    def grade(result: rlkit.ProcessResult) -> float:
        return float(list(result.folder.iterdir()) == [])

    script = f"python3 ask.py; cd /; rm -r $OLDPWD{replacement}"
    assert play(make_env("sh", "-c", script, sandbox=sandbox, grade=grade)).reward == 1.0


def test_a_program_whose_processes_change_its_files_to_the_end_is_graded(sandbox: bool) -> None:
    program = """
open("answer.txt", "w").write("seen")
for number in range(1000):  # copied first
    os.mkdir(f"a{number}")
os.mkdir("z0")
if os.fork():
    os._exit(0)
os.closerange(0, 3)
number = 0
while True:
    os.rename(f"z{number}", f"z{number + 1}")
    number += 1
"""
    assert play(make_env("python3", "-c", ASK + program, sandbox=sandbox)).reward == 1.0


def test_a_program_in_a_sandbox_has_no_network_but_its_endpoint(can_sandbox: None) -> None:
    program = """
import os, socket
for address in (("127.0.0.1", PORT), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, timeout=2)
        print("reached", address)
    except OSError:
        pass
"""

    async def main() -> rlkit.Outcome | None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            env = rlkit.ProcessEnv(
                argv=["python3", "-c", ASK + program.replace("PORT", str(port))],
                grade=lambda result: float(not result.stdout),
            )
            return (await play_env(env, make_policy(), timeout_s=60))[0]

    outcome = asyncio.run(main())
    assert outcome is not None
    assert outcome.reward == 1.0


def test_links_of_a_sandbox_do_not_lead_the_grader_to_files_of_the_host(can_sandbox: None) -> None:
    env = make_env("sh", "-c", "python3 ask.py; ln -s /etc/passwd answer.txt", sandbox=True)
    assert play(env).reward == 0.0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"argv": "python agent.py"}, "argv: 'str' instances are not allowed"),
        ({"argv": []}, "argv: .* at least 1 item"),
        ({"argv": ["a\0"]}, "argv.0: .* pattern"),
        ({"grade": 3}, "grade: Input should be callable"),
        ({"files": {"../x": ""}}, "files: '../x' is not a path"),
        ({"files": {".": ""}}, "files: '.' is not a path"),
        ({"files": {"": ""}}, "files: '' is not a path"),
        ({"files": {"a/b": "", "a": ""}}, "files: 'a/b' is below another file"),
        ({"files": {"a": 3}}, "files.a"),
        ({"variables": {"A=B": "x"}}, "variables.A=B"),
        ({"variables": {"": "x"}}, "variables."),
        ({"variables": {"A": 3}}, "variables.A: Input should be a valid string"),
        ({"timeout_s": -1}, "timeout_s: Input should be greater than 0"),
        ({"timeout_s": float("nan")}, "timeout_s: Input should be a finite number"),
        ({"timeout_s": "60"}, "timeout_s: Input should be a valid number"),
        ({"output_bytes": -1}, "output_bytes: Input should be greater than"),
        ({"folder_bytes": -1}, "folder_bytes: Input should be greater than"),
        ({"sandbox": False, "limits": Limits()}, "limits has no effect"),
        ({"sandbox": False, "host_folders": ["/opt"]}, "host_folders has no effect"),
    ],
)
def test_a_mistake_is_one_line(options: Mapping[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        rlkit.ProcessEnv(**{"argv": ["true"], "grade": grade_answer, **options})  # type: ignore[arg-type]


def test_an_env_is_pickled() -> None:
    env = make_env("true", sandbox=False)
    assert pickle.loads(pickle.dumps(env)) == env


def grade_bytes(result: rlkit.ProcessResult) -> float:
    """Return a reward that differs between the episodes of a random model."""
    return sum((result.folder / "answer.txt").read_bytes()) % 5 / 4


@pytest.mark.slow
def test_each_token_that_a_program_got_is_trained_once(
    can_sandbox: None, byte_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    env = make_env(sys.executable, "agent.py", sandbox=True, grade=grade_bytes, agent_py=AGENT)
    result = rlkit.train(
        envs=[env],
        model=str(byte_model_dir),
        steps=2,
        batch={"groups": 1, "group_size": 4},
        sampling={"max_tokens": 8},
    )
    _, audits = asyncio.run(audit_run(result.directory))
    (audit,) = audits.values()
    assert (audit.mismatch, audit.episodes, audit.turns) == (None, 8, 24)
    assert audit.tokens > 0


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
