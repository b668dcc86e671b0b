"""Environments for tests, and what serves them in this process."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any, override

os.environ.setdefault("OPENREWARD_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("OPENREWARD_LOG_LEVEL", "CRITICAL")

import uvicorn
from openreward.environments import (
    Environment,
    GroupScore,
    ImageBlock,
    Message,
    Server,
    TextBlock,
    ToolOutput,
    terminal,
    tool,
)
from openreward.environments.types import ListToolsOutput, ToolSpec
from pydantic import BaseModel

CALLS: Counter[str] = Counter()
"""How often the call with each mark was carried out."""

PROMPTS: Counter[str] = Counter()
"""How often the prompt of each session was asked for, and by what it was."""


class Mark(BaseModel):
    mark: str
    reward: float | None = None
    finished: bool = False


class Length(BaseModel):
    chars: int


class Text(BaseModel):
    text: str


class Base(Environment):
    @classmethod
    @override
    def list_splits(cls) -> list[Any]:
        return ["train", "test"]

    @classmethod
    @override
    def list_tasks(cls, split: str) -> list[Any]:
        return [{"id": number} for number in range(6 if split == "train" else 2)]

    @override
    def get_prompt(self) -> list[Any]:
        PROMPTS[f"{type(self).__name__}/{id(self)}"] += 1
        return [TextBlock(text=f"Task {self.task_spec['id']}.")]


def make_output(text: str, **rest: Any) -> ToolOutput:
    return ToolOutput(blocks=[TextBlock(text=text)], **rest)


class Marks(Base):
    """Counts calls, and does as it is told."""

    @tool
    async def mark(self, params: Mark) -> ToolOutput:
        """Leave a mark."""
        CALLS[params.mark] += 1
        return make_output(f"marked {params.mark}", reward=params.reward, finished=params.finished)

    @tool
    async def indented(self, params: Length) -> ToolOutput:
        """Text in which every other character is a space."""
        return make_output("x " * (params.chars // 2))

    @tool
    async def fail(self) -> ToolOutput:
        """Raise."""
        raise RuntimeError("the tool is broken, and the secret is hunter2-hunter2")

    @tool
    async def sleep(self) -> ToolOutput:
        """Take long."""
        await asyncio.sleep(30)
        return make_output("slept")

    @tool
    async def picture(self) -> ToolOutput:
        """A red dot."""
        from PIL import Image

        data = BytesIO()
        Image.new("RGB", (8, 8), "red").save(data, "PNG")
        image = ImageBlock(data=base64.b64encode(data.getvalue()).decode(), mimeType="image/png")
        return ToolOutput(blocks=[TextBlock(text="a dot"), image], reward=1.0, finished=True)

    @tool
    async def reveal(self) -> ToolOutput:
        """All that it was given."""
        return make_output(repr(sorted(self.secrets_given.items())), reward=1.0, finished=True)

    def __init__(self, task_spec: Any = {}, secrets: Mapping[str, str] = {}) -> None:  # noqa: B006
        super().__init__(task_spec, dict(secrets))
        self.secrets_given = dict(secrets)


class Answers(Base):
    """Takes a message as the answer, and has no other tool."""

    @terminal
    @tool
    async def answer(self, params: Text) -> ToolOutput:
        """Answer."""
        return make_output("noted", reward=float("yes" in params.text), finished=True)


class Talks(Base):
    """Begins with a conversation, and has a tool for this task alone."""

    @override
    def get_messages(self) -> list[Any]:
        return [
            Message(role="system", blocks=[TextBlock(text="Be brief.")]),
            Message(role="user", blocks=[TextBlock(text="Hello.")]),
            Message(role="assistant", blocks=[TextBlock(text="Hi.")]),
            Message(role="user", blocks=[TextBlock(text="Go on.")]),
        ]

    @tool
    async def shared(self) -> ToolOutput:
        """Tool of all tasks."""
        return make_output("shared")

    @override
    def list_task_tools(self) -> Any:
        return ListToolsOutput(tools=[ToolSpec(name="own", description="Of this task.", input_schema=None)])

    @tool(shared=False)
    async def own(self) -> ToolOutput:
        """Of this task."""
        return make_output("own", reward=1.0, finished=True)


class Compared(Base):
    """Says which answer of a group is the longest, and nothing of one by itself."""

    @terminal
    @tool
    async def answer(self, params: Text) -> ToolOutput:
        """Answer."""
        return make_output("noted", reward=0.25 if "bonus" in params.text else None, finished=True)

    @tool
    async def look(self) -> ToolOutput:
        """Look."""
        return make_output("nothing")

    @override
    async def score_group(self, candidates: Any) -> Any:
        CALLS["scored"] += 1
        texts = [str(candidate.messages[-1].blocks) for candidate in candidates]
        if any("unjudgeable" in text for text in texts):
            raise RuntimeError("the judge gave up, and the secret is hunter2-hunter2")
        longest = max(map(len, texts))
        return [GroupScore(reward=float(len(text) == longest)) for text in texts]


class Broken(Base):
    """Cannot be set up."""

    @override
    async def setup(self) -> None:
        raise RuntimeError("no room")

    @tool
    async def nothing(self) -> ToolOutput:
        """Nothing."""
        return make_output("")


WORLDS: list[type[Environment]] = [Marks, Answers, Talks, Compared, Broken]


@dataclass
class Served:
    url: str
    server: Server

    @property
    def sessions(self) -> int:
        """Sessions that it still has."""
        return len(self.server._active_envs)


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """That of all servers: what their SDK keeps for the whole process belongs to one event loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@contextmanager
def served(environments: list[type[Environment]] = WORLDS, *, port: int = 0) -> Iterator[Served]:
    server = Server(environments)
    config = uvicorn.Config(
        server.app, host="127.0.0.1", port=port, log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    running = uvicorn.Server(config)
    serving = asyncio.run_coroutine_threadsafe(running.serve(), event_loop())
    while not running.started:
        assert not serving.done(), serving.exception()
        time.sleep(0.005)
    port = running.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", server)
    finally:
        running.should_exit = True
        serving.result()


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
