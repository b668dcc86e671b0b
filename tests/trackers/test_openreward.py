"""Uploads to a stub of OpenReward, through the real SDK."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlkit._util import files
from rlkit.errors import MissingError
from rlkit.store import table
from rlkit.store.history import table_path
from rlkit.trackers.from_config import load_service
from rlkit.trackers.openreward import UploadRejected, connect, post_events
from rlkit.trackers.sync import SendingFailed, read_progress, send
from rlkit.types import Group, Json
from tests.builders import episode
from tests.trackers.folders import add_metrics, write_run

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


type Events = list[dict[str, Any]]


@dataclass
class Stub:
    url: str = ""
    status: Callable[[Events], int] = lambda events: 200
    events: Events = field(default_factory=list[dict[str, Any]])

    def started(self) -> list[str]:
        """The names of the rollouts that were begun."""
        return [event["rolloutName"] for event in self.events if event["eventType"] == "rollout"]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    server_stub = Stub()

    async def rollouts(request: Request) -> Response:
        assert request.headers["x-api-key"] == "the-key"
        events: Events = (await request.json())["events"]
        status = server_stub.status(events)
        if status == 200:
            server_stub.events += events
        return JSONResponse({}, status)

    async def environment(request: Request) -> Response:
        return JSONResponse({"id": f"the id of {request.url.path.removeprefix('/v1/environments/')}"})

    app = Starlette(routes=[Route("/v1/rollouts", rollouts, methods=["POST"]), Route("/{path:path}", environment)])
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    server_stub.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    monkeypatch.setenv("OPENREWARD_API_KEY", "the-key")
    monkeypatch.setenv("OPENREWARD_API_URL", server_stub.url)
    yield server_stub
    server.should_exit = True
    thread.join()


def write_step(directory: Path, step: int, *, rewards: tuple[float | None, ...] = (1.0, 0.0)) -> None:
    session: Json = {"target": "Owner/Cats", "hosted": True, "variant": "big", "split": "train/easy", "index": 12}
    info: dict[str, Json] = {"messages": MESSAGES, "ended": "finished", "openreward": session}
    episodes = tuple(
        replace(episode(reward, member=member), info=info if reward is not None else {})
        for member, reward in enumerate(rewards)
    )
    hosted_group = Group("cats", "Owner/Cats#big/train/easy/12", 3, episodes)
    talk = replace(episode(1.0), info={"messages": "an environment of one's own keeps what it likes"})
    other = Group("sums", "1+1", 4, (talk,))
    groups = [table.RecordedGroup(group, True, group.episodes) for group in (hosted_group, other)]
    path = table_path(directory, step)
    files.make_folder(path.parent)
    table.write(path, groups)
    add_metrics(directory, step)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_run(tmp_path / "my run", steps=0, settings={"model": "acme/tiny"})


def upload(directory: Path, **settings: object) -> int:
    """Upload the steps that are not uploaded yet, and return their number."""
    return send(directory, load_service("openreward", settings), sleep=lambda seconds: None)


def test_rollouts_are_uploaded_once_with_their_labels_and_rewards(
    stub: Stub, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_step(directory, 1, rewards=(1.0, None, 0.25))
    assert upload(directory) == 2
    names = [f"step 1 · Owner/Cats#big/train/easy/12 · {member}" for member in (0, 2)]
    assert stub.started() == names
    first_rollout = next(event for event in stub.events if event["eventType"] == "rollout")
    labels = {
        key: first_rollout[key] for key in ("runName", "environment", "environment_id", "variant", "split", "step")
    }
    assert labels == {
        "runName": "my run",
        "environment": "Owner/Cats",
        "environment_id": "the id of Owner/Cats",
        "variant": "big",
        "split": "train/easy",
        "step": 1,
    }
    assert first_rollout["run_info"]["model_name"] == "acme/tiny"
    messages = [event for event in stub.events if event["eventType"] == "message"]
    assert [event["type"] for event in messages[:5]] == [
        "user_message", "reasoning", "tool_call", "tool_result", "assistant_message",
    ]  # fmt: skip
    assert [event["reward"] for event in messages if event["isFinished"]] == [1.0, 0.25]
    assert {event["rolloutEventId"] for event in messages[:5]} == {first_rollout["eventId"]}
    (rollout_info, _) = [event["rollout_info"] for event in stub.events if event["eventType"] == "rollout_update"]
    assert (rollout_info["task_index"], rollout_info["current_step"]) == (12, 1)

    stub.events.clear()
    write_step(directory, 2)
    assert upload(directory, name="another") == 1
    assert {event["runName"] for event in stub.events if event["eventType"] == "rollout"} == {"another"}
    assert all(name.startswith("step 2") for name in stub.started())
    assert capfd.readouterr().out == "", "stdout is for what a command was asked for"


def test_step_counts_as_uploaded_once_all_requests_succeeded(stub: Stub, directory: Path) -> None:
    stub.status = lambda events: 200 if events[0]["eventType"] == "rollout" else 500
    write_step(directory, 1)
    with pytest.raises(SendingFailed, match=r"openreward: sending step 1 failed: HTTPStatusError: .* '500 "):
        upload(directory)
    assert read_progress(directory, "openreward").step == 0
    first = [event["eventId"] for event in stub.events]
    stub.events.clear()
    stub.status = lambda events: 200
    assert upload(directory) == 1
    assert stub.events[0]["eventId"] == first[0], "what is sent twice can be told"


def test_uploaded_rollouts_of_a_step_are_not_sent_again_after_a_failure(stub: Stub, directory: Path) -> None:
    statuses = iter([200, 200, 503])
    stub.status = lambda events: next(statuses, 200)
    write_step(directory, 1)
    assert upload(directory) == 2
    assert [name[-1] for name in stub.started()] == ["0", "1"]


def test_invalid_rollout_does_not_block_other_uploads(stub: Stub, directory: Path) -> None:
    write_step(directory, 1)
    stub.status = lambda events: 413 if events[0].get("rolloutName", "").endswith("· 0") else 200
    with pytest.raises(UploadRejected, match="OpenReward rejected a rollout of step 1: HTTP 413"):
        upload(directory)
    assert [name[-1] for name in stub.started()] == ["1"]
    assert read_progress(directory, "openreward").step == 1


def test_long_messages_are_split_over_several_requests(stub: Stub) -> None:
    sizes = list[int]()

    def status(events: Events) -> int:
        sizes.append(len(events))
        return 200

    stub.status = status
    with connect() as http:
        post_events(http, [{"eventType": "message", "content": "x" * 400_000}] * 5 + [{"eventType": "message"}] * 300)
    assert sum(sizes) == 305
    assert len(sizes) == 5


def test_command_line_requires_a_key_for_uploads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from rlkit.cli.app import app

    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "envs.arithmetic.weight=1", "--openreward", "--quiet"])
    assert result.exit_code == 3
    assert result.stderr.startswith("error: OPENREWARD_API_KEY is not set: set it, or leave out")


def test_without_a_key_there_are_no_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    with pytest.raises(MissingError, match="OPENREWARD_API_KEY is not set"):
        load_service("openreward", {})
