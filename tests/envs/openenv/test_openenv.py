"""Environments of OpenEnv: a server with its own package, and servers that lie."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.sync.client import connect

from rlkit.envs.openenv import openenv
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.policy import Limits
from rlkit.testing import ScriptedPolicy
from rlkit.types import Outcome
from tests.addresses import closed_port
from tests.limits import HANG_S, wait_until

ROOT = Path(__file__).parents[3]
UV = os.environ.get("UV") or shutil.which("uv")

needs_uv = pytest.mark.skipif(UV is None, reason="uv is not installed")


@pytest.fixture(scope="module")
def guessing() -> Iterator[str]:
    """Run a server with the package of OpenEnv, in a virtual environment that uv makes."""
    port = closed_port()
    program = [sys.executable, str(Path(__file__).with_name("server.py")), str(port)]
    python = [str(UV), "run", "--no-project", "--python", sys.executable, "--with", "openenv==0.10.0"]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    server = subprocess.Popen([*python, "python", *program[1:]], env=environ, stderr=subprocess.PIPE, text=True)
    url = f"ws://127.0.0.1:{port}"

    def answers() -> bool:
        assert server.poll() is None, server.stderr and server.stderr.read()
        try:
            connect(f"{url}/ws").close()
        except OSError:
            return False
        return True

    try:
        wait_until(answers)
        yield url
    finally:
        server.terminate()
        server.communicate()


@needs_uv
@pytest.mark.slow
def test_an_action_is_the_json_in_a_reply(guessing: str) -> None:
    (task,) = openenv(url=guessing, count=1, seed=17, show="text")
    policy = ScriptedPolicy(
        ['I think {"number": 3} or {"number": 4}.', "7", '{"nr": 7}', '```json\n{"number": 7}\n```']
    )
    outcome = asyncio.run(task.rollout(policy))
    assert (outcome.reward, outcome.truncated, outcome.metrics) == (0.75, False, {"invalid_actions": 2.0})
    assert [turn.parent for turn in policy.turns] == [None, 0, 1, 2]
    assert [turn.reward for turn in policy.turns] == [-0.25, None, None, 1.0]
    assert "Guess a number from 0 to 9." in policy.prompts[0]
    assert "Higher." in policy.prompts[1]
    assert "error: the reply contains no valid action" in policy.prompts[2]
    assert "error: VALIDATION_ERROR" in policy.prompts[3]


@needs_uv
@pytest.mark.slow
def test_an_action_is_a_template_with_the_reply(guessing: str) -> None:
    (task,) = openenv(url=guessing, count=1, seed=17, action={"number": "{reply}"})
    assert asyncio.run(task.rollout(ScriptedPolicy(["3", "7"]))).reward == 0.75
    (wrong,) = openenv(url=guessing, count=1, action={"nr": "{reply}"})
    with pytest.raises(EnvironmentFault, match="VALIDATION_ERROR: Invalid message"):
        asyncio.run(wrong.rollout(ScriptedPolicy(["3"])))


@needs_uv
@pytest.mark.slow
def test_limits_truncate_and_errors_of_the_environment_fail(guessing: str) -> None:
    (task,) = openenv(url=guessing, count=1, seed=9, max_turns=2)
    outcome = asyncio.run(task.rollout(ScriptedPolicy(['{"number": 1}'] * 2)))
    assert (outcome.reward, outcome.truncated) == (-0.5, True)
    outcome = asyncio.run(task.rollout(ScriptedPolicy(['{"number": 1}'], limits=Limits(max_turns=1))))
    assert (outcome.reward, outcome.truncated) == (-0.25, True)
    with pytest.raises(EnvironmentFault, match=r"^EXECUTION_ERROR: the number is too large$"):
        asyncio.run(task.rollout(ScriptedPolicy(['{"number": 100}'])))


@needs_uv
@pytest.mark.slow
def test_a_run_trains_on_a_server(guessing: str, byte_model_dir: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "RLKIT_RUNS_DIR": str(tmp_path)}
    action = 'envs.guessing.args.action={"number": 3, "metadata": {"said": "{reply}"}}'
    small = [f"model={byte_model_dir}", "batch.groups=2", "batch.group_size=2", "steps=1", "sampling.max_tokens=8"]
    train = ["train", "examples/openenv.yaml", "--name", "first", *small, action, f"envs.guessing.args.url={guessing}"]
    for arguments in (train, ["audit", "first"]):
        command = [sys.executable, "-m", "rlkit", *arguments]
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    rows = pd.read_parquet(tmp_path / "first" / "episodes").to_dict("records")
    assert len(rows) == 4
    for row in rows:
        guesses = 1 if int(row["task"]) % 10 == 3 else 5
        assert (row["reward"], len(row["turns"])) == (1.0 if guesses == 1 else -1.25, guesses)


OPENING = {"type": "observation", "data": {"observation": {"text": "Begin."}, "reward": None, "done": False}}


def answer(**data: object) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"text": "x"}, "done": True, **data}})


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        ("{", "ValidationError"),
        ("[" * 100_000, "ValidationError"),
        (b"\xff\xfe", "ValidationError"),
        ('{"type": "observation", "data": []}', "ValidationError"),
        ('{"type": "other", "data": {}}', "ProtocolError: other"),
        ('{"type": "error", "data": {"code": "SESSION_ERROR", "message": "gone"}}', "SESSION_ERROR: gone"),
        ('{"type": "error", "data": {}}', "ProtocolError: error"),
        (answer(reward="1"), "ValidationError"),
        (answer(reward=float("nan")), "ValidationError"),
        (answer(reward=float("inf")), "ValidationError"),
        (answer(reward=10**400), "ValidationError"),
        (answer(reward=None), "RewardError: the server gave no reward"),
        (answer(reward=None, done=False), "RewardError: the server gave no reward"),
        (answer(reward=1, done="yes"), "ValidationError"),
        (answer(reward=1, observation="x"), "ValidationError"),
        (answer(reward=1, observation={"other": "x"}), "ObservationError: the server's observation has no 'text'"),
        ("x" * (17 << 20), "ConnectionClosedError"),
        (None, "TimeoutError: ws://.*: no answer within answer_timeout_s=1$"),
        ("close", "ConnectionClosed"),
    ],
    ids=str,
)
def test_a_server_that_lies_fails_the_episode(lie: str | bytes | None, error: str) -> None:
    async def talk(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(json.dumps(OPENING))
        await connection.recv()
        if lie == "close":
            await connection.close()
        elif lie is not None:
            await connection.send(lie)
        await connection.wait_closed()

    async def main() -> None:
        async with serve(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            url, limit_s = f"ws://127.0.0.1:{port}", 1.0 if lie is None else HANG_S
            (task,) = openenv(url=url, count=1, show="text", max_turns=1, answer_timeout_s=limit_s)
            await task.rollout(ScriptedPolicy(["{}"]))

    with pytest.raises(EnvironmentFault, match=f"^{error}"):
        asyncio.run(main())


def test_a_server_that_is_not_there_fails_the_episode() -> None:
    (task,) = openenv(url=f"ws://127.0.0.1:{closed_port()}", count=1)
    with pytest.raises(EnvironmentFault, match=r"^ConnectionRefusedError|^OSError"):
        asyncio.run(task.rollout(ScriptedPolicy([])))


def test_replies_without_an_action_are_no_failure_of_the_server() -> None:
    async def talk(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(json.dumps(OPENING))
        await connection.wait_closed()

    async def main() -> Outcome:
        async with serve(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            (task,) = openenv(url=f"ws://127.0.0.1:{port}", count=1, max_turns=2)
            return await task.rollout(ScriptedPolicy(["one", "two"]))

    assert asyncio.run(main()) == Outcome(0.0, {"invalid_actions": 2.0}, truncated=True)


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ('I think {maybe}: {"guess": 3} or {"guess": 4}', {"guess": 3}),
        ('{"guess": NaN} {"guess": -Infinity} {"guess": 1e999} {"guess": 2.5}', {"guess": 2.5}),
        ('{"guess": NaN}', None),
        ('{"guess": 1e999}', None),
        ('{"a": ' * 100_000, None),
    ],
)
def test_an_action_is_the_first_valid_object_of_a_reply(reply: str, action: object) -> None:
    received = list[object]()

    async def talk(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(json.dumps(OPENING))
        async for request in connection:
            received.append(json.loads(request)["data"])
            await connection.send(answer(reward=0.0))

    async def main() -> Outcome:
        async with serve(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            (task,) = openenv(url=f"ws://127.0.0.1:{port}", count=1, max_turns=1)
            return await task.rollout(ScriptedPolicy([reply]))

    assert asyncio.run(main()).metrics == {"invalid_actions": float(action is None)}
    assert received == ([] if action is None else [action])


@pytest.mark.parametrize(
    ("url", "reason"),
    [("http://x", "scheme should be 'ws' or 'wss'"), ("ws://", "empty host"), ("ws://x:99999", "invalid port number")],
)
def test_an_address_of_another_kind_is_a_mistake(url: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"^url: .*{reason}"):
        openenv(url=url)


def test_an_address_is_kept() -> None:
    assert [openenv(url=f"ws://x:8000{end}", count=1)[0].url for end in ("", "/", "/a/")] == [
        "ws://x:8000",
        "ws://x:8000",
        "ws://x:8000/a",
    ]


def test_tasks_are_seeds() -> None:
    assert [task.task_id for task in openenv(url="ws://x", count=3, seed=5)] == ["5", "6", "7"]
