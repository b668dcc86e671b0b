from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path

import pytest

from tests.sandbox.conftest import cache, can_sandbox, left, sandbox_cache

# Read when Harbor's agents are imported: without it, that asks the network for a table of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["HARBOR_TELEMETRY"] = "0"

__all__ = ["cache", "can_sandbox", "left", "sandbox_cache"]

SETTINGS = """schema_version = "1.0"
[metadata]
[agent]
timeout_sec = 600
[verifier]
timeout_sec = 600
[environment]
build_timeout_sec = 600
"""

DOCKERFILE = """FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04
ENV GREETING=hello
WORKDIR /app
COPY data.txt .
RUN echo built > built
"""

TEST = """#!/bin/bash
if [ "$(cat out)" = "hello data" ] && [ -f built ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(folder: Path, *, settings: str = "", dockerfile: str | None = DOCKERFILE, test: str = TEST) -> Path:
    """A tiny task: `/app/out` must hold a variable of the image and a file of its."""
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "instruction.md").write_text("Greet.")
    (folder / "task.toml").write_text(SETTINGS + settings)
    if dockerfile is not None:
        (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "environment" / "data.txt").write_text("data")
    (folder / "tests" / "test.sh").write_text(test)
    (folder / "solution" / "solve.sh").write_text('#!/bin/bash\necho "$GREETING $(cat data.txt)" > out; echo noise\n')
    return folder


class AgentTime:
    """Ends the time of an agent when a test says so, however long the agent has taken until then."""

    limit_s = 4321.0
    """The limit to give to the agent; others are as they are."""

    def __init__(self) -> None:
        self._limit: asyncio.Timeout | None = None

    async def wait_for[T](self, work: Awaitable[T], timeout: float | None) -> T:
        """Stand in for `asyncio.wait_for`."""
        async with asyncio.timeout(timeout) as limit:
            if timeout == self.limit_s:
                self._limit = limit
            return await work

    def end(self) -> None:
        """Let it be over."""
        assert self._limit is not None
        self._limit.reschedule(asyncio.get_running_loop().time())


@pytest.fixture
def agent_time(monkeypatch: pytest.MonkeyPatch) -> AgentTime:
    """Says when an agent's time is over that has `agent_time.limit_s`."""
    time_limits = AgentTime()
    monkeypatch.setattr(asyncio, "wait_for", time_limits.wait_for)
    return time_limits


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path / "task")
