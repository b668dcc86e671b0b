"""Servers that do not keep to the standard: what they send is an error of one line, or it is played; never a reward."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rlkit._util.priority_semaphore import Slots
from rlkit.env import Task
from rlkit.envs.openreward import openreward
from rlkit.policy import Limits
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.types import Episode, Sampling
from tests.envs.openreward.worlds import call
from tests.marks import split_slow

GO = call("go")


@dataclass
class Liar:
    """A server that gives the answers that it was given, as JSON."""

    url: str = ""
    messages: str = '[{"role": "user", "blocks": [{"type": "text", "text": "Go."}]}]'
    tools: str = '{"tools": [{"name": "go", "description": "Go.", "input_schema": null}]}'
    output: str = '{"blocks": [], "metadata": null, "reward": 1, "finished": true}'
    open: set[str] = field(default_factory=set[str])


def stream(data: str) -> Response:
    return PlainTextResponse(f"event: task_id\ndata: 1\n\nevent: end\ndata: {data}\n\n", media_type="text/event-stream")


@pytest.fixture
def liar() -> Iterator[Liar]:
    lying_server = Liar()
    numbers = iter(range(10**6))

    async def answer(request: Request) -> Response:
        match request.url.path.rpartition("/")[2]:
            case "list_environments":
                return PlainTextResponse('["lies"]')
            case "splits":
                return PlainTextResponse('[{"name": "train"}]')
            case "num_tasks":
                return PlainTextResponse('{"num_tasks": 2}')
            case "create_session":
                return stream(json.dumps({"sid": f"s{next(numbers)}"}))
            case "create":
                lying_server.open.add(request.headers["x-session-id"])
            case "messages":
                return PlainTextResponse(lying_server.messages)
            case "task_tools":
                return PlainTextResponse(lying_server.tools)
            case "call":
                return stream(f'{{"ok": true, "output": {lying_server.output}}}')
            case "delete":
                lying_server.open.discard(request.headers["x-session-id"])
            case _:
                pass
        return PlainTextResponse("{}")

    class AsJson(PlainTextResponse):
        media_type = "application/json"

    async def typed(request: Request) -> Response:
        response = await answer(request)
        if response.media_type != "text/event-stream":
            response = AsJson(response.body)
        return response

    app = Starlette(routes=[Route("/{path:path}", typed, methods=["GET", "POST"])])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    lying_server.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield lying_server
    server.should_exit = True
    thread.join()


def play(liar: Liar, *, replies: tuple[str, ...] = (GO,), **args: Any) -> Episode:
    chat = ByteChat()
    replies_left = iter(replies)

    def author(prompt: str, *, seed: int) -> str:
        return next(replies_left)

    player = Player(
        LocalRunner(chat), {"lies": EnvSettings(1, Sampling(300), 60.0, 0, Limits())}, seed=0, slots=Slots(1)
    )
    sampler = ScriptedSampler(author, chat=chat)
    task = openreward(target=liar.url, **args)[0]
    group = asyncio.run(player.play(Task(0, "lies", task), lambda: sampler))
    assert not liar.open, "a session was left on the server"
    return group.episodes[0]


def output(**changes: object) -> str:
    return json.dumps({"blocks": [], "metadata": None, "reward": 1.0, "finished": True, **changes})


def blocks(*contents: object) -> str:
    return json.dumps([{"role": "user", "blocks": contents}])


def test_a_server_that_keeps_to_the_standard_is_played(liar: Liar) -> None:
    episode = play(liar)
    assert (episode.status, episode.reward, episode.error) == ("completed", 1.0, None)


@pytest.mark.parametrize(
    ("output", "error"),
    split_slow(
        [
            (output(reward="1"), "lies: go gave the reward '1'; rewards must be finite numbers"),
            (output(reward=float("nan")), "lies: go gave the reward nan; rewards must be finite numbers"),
            (output(reward=float("-inf")), "lies: go gave the reward -inf; rewards must be finite numbers"),
            (output(reward=10**400), "rewards must be finite numbers"),
            (output(reward=[1.0]), r"lies: go gave the reward \[1.0\]; rewards must be finite numbers"),
            (output(finished="no"), "lies: go returned 'no' for finished"),
            (output(finished=None), "lies: go returned None for finished"),
            (output(blocks=[{"type": "text", "text": 5}]), "the server sent 5 where a text has its place"),
            (output(blocks=[{"type": "video", "data": ""}]), "the server sent a block of type 'video'"),
            (output(blocks=None), "lies: calling go: TypeError"),
            ("[]", "lies: calling go: TypeError"),
            ("{}", "lies: calling go: KeyError"),
            ("{", "lies: calling go: JSONDecodeError"),
        ],
        lambda case: case[0] in (output(reward=float("nan")), output(finished=None), "{"),
    ),
)
def test_an_invalid_call_result_gives_no_reward(liar: Liar, output: str, error: str) -> None:
    liar.output = output
    episode = play(liar)
    assert (episode.status, episode.reward) == ("failed", None)
    assert episode.error is not None
    assert re.search(error, episode.error)
    assert len(episode.error.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "error"),
    split_slow(
        [
            ({"messages": "[]"}, "the server sent no message to begin with"),
            ({"messages": '"Go."'}, "lies: requesting the prompt: TypeError"),
            ({"messages": "null"}, "lies: requesting the prompt: TypeError"),
            ({"messages": "{"}, "lies: requesting the prompt: JSONDecodeError"),
            ({"messages": '[{"role": "robot", "blocks": []}]'}, "the server sent a message of 'robot'"),
            ({"messages": blocks({"type": "audio", "data": ""})}, "the server sent a block of type 'audio'"),
            ({"messages": blocks({"type": "text", "text": None})}, "the server sent None where a text"),
            ({"messages": blocks({"type": "tool_call", "id": "1", "name": "go", "input": {}})}, "of type 'tool_call'"),
            (
                {"tools": '{"tools": [{"name": "go", "description": "", "input_schema": [1]}]}'},
                "not with a JSON schema",
            ),
            ({"tools": '{"tools": [{"name": 7, "description": "", "input_schema": null}]}'}, "which are not texts"),
            ({"tools": '{"tools": [{"title": "go"}]}'}, "lies: requesting the tools: TypeError"),
            ({"tools": "{}"}, "lies: requesting the tools: KeyError"),
        ],
        lambda case: case[0] in ({"messages": "[]"}, {"messages": "{"}, {"tools": "{}"}),
    ),
)
def test_an_invalid_task_fails_the_episode(liar: Liar, changes: dict[str, str], error: str) -> None:
    vars(liar).update(changes)
    episode = play(liar)
    assert (episode.status, episode.turns) == ("failed", ())
    assert error in (episode.error or "")


def test_unserialisable_data_fails_the_episode_and_not_the_run(liar: Liar) -> None:
    liar.output = output(blocks=[{"type": "text", "text": "half \ud83d"}], finished=False)
    episode = play(liar, replies=(GO, "done"))
    assert episode.status == "failed"
    assert len((episode.error or "").splitlines()) == 1


def test_a_reward_sum_that_overflows_fails_the_episode(liar: Liar) -> None:
    liar.output = output(reward=1.7e308, finished=False)
    episode = play(liar, replies=(GO + GO, "done"))
    assert (episode.status, episode.reward) == ("failed", None)


def test_a_finished_environment_gets_no_more_requests(liar: Liar) -> None:
    episode = play(liar, replies=(GO + GO + GO,))
    assert (episode.reward, episode.info["rewards"]) == (1.0, [1.0])


def test_tool_names_reach_formats_that_need_them(liar: Liar) -> None:
    liar.messages = json.dumps(
        [
            {"role": "user", "blocks": [{"type": "text", "text": "?"}]},
            {"role": "assistant", "blocks": [{"type": "tool_call", "id": "a", "name": "go", "input": {}}]},
            {"role": "user", "blocks": [{"type": "tool_result", "tool_call_id": "a", "blocks": []}]},
        ]
    )
    episode = play(liar)
    messages = episode.info["messages"]
    assert isinstance(messages, list)
    assert messages[2] == {"role": "tool", "content": "", "tool_call_id": "a", "name": "go"}
