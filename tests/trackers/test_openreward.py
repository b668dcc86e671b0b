"""Uploads to a stub of OpenReward, through the real SDK."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlkit.errors import MissingError
from rlkit.store import table
from rlkit.store.history import table_path
from rlkit.trackers import Broadcast, Progress, RunInfo
from rlkit.trackers.console import ConsoleTracker
from rlkit.trackers.openreward import OpenRewardTracker
from rlkit.types import Group, Json
from tests.builders import episode

MESSAGES: list[Json] = [
    {"role": "user", "content": "What is it?"},
    {
        "role": "assistant",
        "content": "",
        "thinking": "hm",
        "tool_calls": [{"id": "c", "name": "look", "arguments": {}}],
    },
    {"role": "tool", "content": "a cat", "tool_call_id": "c"},
    {"role": "assistant", "content": "A cat."},
]


@dataclass
class Stub:
    url: str = ""
    status: int = 200
    events: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    found = Stub()

    async def rollouts(request: Request) -> Response:
        if found.status == 200:
            assert request.headers["x-api-key"] == "the-key"
            found.events += (await request.json())["events"]
        return JSONResponse({}, found.status)

    async def environment(request: Request) -> Response:
        return JSONResponse({"id": "1"})

    app = Starlette(routes=[Route("/v1/rollouts", rollouts, methods=["POST"]), Route("/{path:path}", environment)])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    found.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    monkeypatch.setenv("OPENREWARD_API_KEY", "the-key")
    monkeypatch.setenv("OPENREWARD_API_URL", found.url)
    yield found
    server.should_exit = True
    thread.join()


def write_step(directory: Path, step: int, *, rewards: tuple[float | None, ...] = (1.0, 0.0)) -> None:
    info = {"messages": MESSAGES, "ended": "finished"}
    episodes = tuple(
        replace(episode(reward, member=member), info=info if reward is not None else {})
        for member, reward in enumerate(rewards)
    )
    ours = Group("cats", "Owner/Cats#big/train/12", 3, episodes)
    other = Group("sums", "1+1", 4, (episode(1.0),))
    groups = [table.StepGroup(one, True, one.episodes) for one in (ours, other)]
    path = table_path(directory, step)
    path.parent.mkdir(parents=True)
    table.write(path, groups, decode=lambda tokens: "")


def run_info(directory: Path) -> RunInfo:
    return RunInfo("my run", directory, "acme/tiny", ("cats",), "the engine", Progress)


def test_rollouts_are_uploaded_with_run_step_split_and_reward_and_only_once(stub: Stub, tmp_path: Path) -> None:
    write_step(tmp_path, 1, rewards=(1.0, None, 0.25))
    tracker = OpenRewardTracker()
    tracker.started(run_info(tmp_path))
    tracker.step(1, {})
    tracker.finished(None)
    started = [event for event in stub.events if event.get("run_name") or event.get("runName")]
    assert len(started) == 2, stub.events
    assert "my run" in json.dumps(started[0]) and "train" in json.dumps(started[0])
    assert "step 1 · Owner/Cats#big/train/12 · 0" in json.dumps(started[0], ensure_ascii=False)
    assert sorted(event["reward"] for event in stub.events if event.get("reward") is not None) == [0.25, 1.0]
    text = json.dumps(stub.events)
    assert all(word in text for word in ("What is it?", "hm", "look", "a cat", "A cat."))
    assert json.loads((tmp_path / "openreward.json").read_text()) == {"uploaded_step": 1}

    stub.events.clear()
    write_step(tmp_path, 2)
    again = OpenRewardTracker(run_name="another")
    again.started(run_info(tmp_path))
    again.step(2, {})
    again.finished(None)
    assert "another" in json.dumps(stub.events)
    assert "step 1" not in json.dumps(stub.events)


def test_a_refusal_is_told_once_and_the_run_goes_on(stub: Stub, tmp_path: Path) -> None:
    stub.status = 401
    write_step(tmp_path, 1)
    notes = list[str]()
    tracker = OpenRewardTracker(last_s=5)

    both = Broadcast([tracker, ConsoleTracker(notes.append)])
    both.started(run_info(tmp_path))
    both.step(1, {})
    both.finished(None)
    assert sum("could not be uploaded" in note for note in notes) == 1
    assert not (tmp_path / "openreward.json").exists()


def test_the_end_of_a_run_does_not_wait_for_long(stub: Stub, tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    stub.status = 500  # the SDK tries again for seconds
    tracker = OpenRewardTracker(last_s=0.2)
    tracker.started(run_info(tmp_path))
    tracker.step(1, {})
    began = time.monotonic()
    tracker.finished(None)
    assert time.monotonic() - began < 5


def test_the_command_line_wants_a_key_for_uploads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from rlkit.cli.app import app

    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "envs.arithmetic.weight=1", "--openreward", "--quiet"])
    assert result.exit_code == 3
    assert result.stderr.startswith("error: OPENREWARD_API_KEY is not set: uploads to OpenReward need it")


def test_without_a_key_there_are_no_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    with pytest.raises(MissingError, match="OPENREWARD_API_KEY is not set"):
        OpenRewardTracker()
