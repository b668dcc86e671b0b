"""The N-th call of an environment fails, for every N: only its rollout is retried, and the run continues."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pytest

import rlkit
from rlkit.chat.format import ParsedReply
from rlkit.testing import ByteChat, World
from rlkit.types import Json, Tokens
from tests.marks import split_slow

from .simulation import Simulation, Word

EXHAUSTIVE = os.environ.get("RLKIT_TEST_EXHAUSTIVE") == "1"
SCHEDULES = {
    "sync": {},
    "stream": {"mode": "stream"},
    "async": {"mode": "async", "max_staleness": 2, "staleness": "strict"},
}
STEPS, GROUPS, SIZE = 2, 2, 2
SLOW_S = 1e5  # longer than any rollout may take


@dataclass
class Calls:
    """Count the calls of environments; the `broken`-th call fails."""

    broken: int = 0
    how: str = ""
    count: int = 0
    names: Counter[str] = field(default_factory=Counter[str])
    open: int = 0
    """Episodes that were begun and not closed."""

    def plain(self, name: str) -> None:
        """An ordinary function is called."""
        self.count += 1
        self.names[name] += 1
        if self.count == self.broken:
            self.fail()

    async def slow(self, name: str) -> None:
        """A coroutine is called."""
        if self.how != "hangs":
            return self.plain(name)
        self.count += 1
        self.names[name] += 1
        if self.count == self.broken:
            await asyncio.sleep(SLOW_S)

    def fail(self) -> None:
        match self.how:
            case "raises":
                raise RuntimeError("the sandbox died")
            case "times out":
                raise TimeoutError("the tool took too long")
            case "is cancelled":
                raise asyncio.CancelledError
            case "cancels":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            case _:
                pass


class ToolChat(ByteChat):
    """Make every other reply a tool call."""

    def parse(self, completion: Tokens) -> ParsedReply:
        call: rlkit.ToolCall = {"id": "1", "name": "look", "arguments": {}}
        message: rlkit.Message = {"role": "assistant", "content": self.decode(completion)}
        return ParsedReply({**message, "tool_calls": [call]} if len(completion) % 2 else message)


class Tools(rlkit.ToolEnv[list[str]]):
    """Tool environment in which every method can fail."""

    max_turns = 2

    def __init__(self, number: int, calls: Calls) -> None:
        self.task_id = f"task-{number}"
        self.calls = calls

    def reset(self) -> tuple[list[str], list[rlkit.Message]]:
        self.calls.plain("reset")
        self.calls.open += 1
        return [], [{"role": "user", "content": self.task_id}]

    def tools(self) -> list[rlkit.Tool]:
        return [{"name": "look", "description": "", "parameters": {}}]

    async def call(self, state: list[str], call: rlkit.ToolCall) -> str:
        await self.calls.slow("call")
        return "nothing"

    async def grade(self, state: list[str], reply: rlkit.Reply | None) -> float:
        await self.calls.slow("grade")
        assert reply is not None
        return float(reply.text.count("e")) + 0.01 * len(reply.text)

    async def close(self, state: list[str]) -> None:
        self.calls.open -= 1
        await self.calls.slow("close")


class Steps(rlkit.StepEnv[list[str]]):
    """Step environment in which every method can fail."""

    max_turns = 2

    def __init__(self, number: int, calls: Calls) -> None:
        self.task_id = f"task-{number}"
        self.calls = calls

    def reset(self) -> tuple[list[str], list[rlkit.Message]]:
        self.calls.plain("reset")
        self.calls.open += 1
        return [], [{"role": "user", "content": self.task_id}]

    async def step(self, state: list[str], reply: rlkit.Reply) -> rlkit.Step:
        await self.calls.slow("step")
        return rlkit.Step([{"role": "user", "content": "go on"}], reward=float(reply.text.count("e")))

    async def close(self, state: list[str]) -> None:
        self.calls.open -= 1
        await self.calls.slow("close")


class Single(rlkit.SingleTurnEnv):
    """Single-turn environment in which every method can fail."""

    def __init__(self, number: int, calls: Calls) -> None:
        self.task_id = f"task-{number}"
        self.calls = calls

    def prompt(self) -> str:
        self.calls.plain("prompt")
        return self.task_id

    def grade(self, reply: rlkit.Reply) -> float:
        self.calls.plain("grade")
        return float(reply.text.count("e"))


def simulation(directory: Path, schedule: str, tasks: Callable[[int, Calls], rlkit.Env], calls: Calls) -> Simulation:
    settings = {
        "steps": STEPS,
        "batch": {"groups": GROUPS, "group_size": SIZE},
        "schedule": SCHEDULES[schedule],
        "rollouts": {"timeout_s": 1000.0},
        "checkpoint": {"every": 1},
    }
    played = [tasks(number, calls) for number in range(20)]
    return Simulation(directory, World(), settings=settings, tasks=played, chat=ToolChat())


@pytest.mark.parametrize("how", ["raises", "times out", "is cancelled", "cancels", "hangs"])
@pytest.mark.parametrize(
    ("kind", "schedule"),
    split_slow(
        [(Single, "sync"), (Tools, "stream"), (Steps, "async"), (Steps, "sync")], lambda case: case[1] != "sync"
    ),
)
def test_failure_of_any_environment_call_repeats_only_its_rollout(
    kind: Callable[[int, Calls], rlkit.Env], schedule: str, how: str, tmp_path: Path
) -> None:
    uninterrupted = Calls()
    simulation(tmp_path / "whole", schedule, kind, uninterrupted).train()
    assert uninterrupted.count >= 16
    assert kind is not Tools or uninterrupted.names["call"] >= 4
    for number in range(1, uninterrupted.count + 1, 1 if EXHAUSTIVE else 5):
        calls = Calls(number, how)
        run = simulation(tmp_path / f"{number}", schedule, kind, calls)
        assert run.train().status == "completed"
        assert calls.open == 0
        episodes = pd.read_parquet(run.directory / "episodes")
        trained = episodes[episodes.counts & episodes.final]
        assert len(trained) == STEPS * GROUPS * SIZE  # a full batch each step, of episodes that did not fail
        assert (trained.status != "failed").all()
        failed = episodes[episodes.status == "failed"]
        expected = how != "hangs" or calls.count > uninterrupted.count  # an ordinary function does not hang here
        assert len(failed) == expected, (number, how)
        assert (failed.attempt == 0).all()
        assert failed.reward.isna().all()
        assert len(run.ears.saved) == STEPS


class Source(rlkit.TaskSource):
    """Task source whose N-th call of a method fails."""

    def __init__(self, method: str, number: int, error: BaseException) -> None:
        self.method, self.remaining_calls, self.error = method, number, error
        self.draw_count = 0

    def next(self) -> rlkit.Env:
        self._called("next")
        self.draw_count += 1
        return Word(self.draw_count)

    def observe(self, group: rlkit.Group) -> None:
        self._called("observe")

    def state_dict(self) -> Mapping[str, Json]:
        self._called("state_dict")
        return {"drawn": self.draw_count}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        self._called("load")
        self.draw_count = state["drawn"]  # type: ignore[assignment]  its own

    def _called(self, method: str) -> None:
        if method == self.method:
            self.remaining_calls -= 1
            if not self.remaining_calls:
                raise self.error


@pytest.mark.parametrize(
    ("method", "number"), [("next", 1), ("next", 5), ("observe", 4), ("state_dict", 1), ("state_dict", 3), ("load", 1)]
)
@pytest.mark.parametrize("schedule", split_slow(SCHEDULES, lambda name: name == "async"))
def test_failing_task_source_is_named_and_the_run_can_be_resumed(
    schedule: str, method: str, number: int, tmp_path: Path
) -> None:
    error = TimeoutError("no answer") if schedule == "stream" else RuntimeError("the archive is gone")
    settings = {"schedule": SCHEDULES[schedule], "checkpoint": {"every": 1}}
    uninterrupted = Simulation(tmp_path / "whole", World(), settings=settings)
    uninterrupted.tasks = Source("none", 1, error)  # type: ignore[assignment]  a source is a collection of tasks, too
    uninterrupted.train()
    run = Simulation(tmp_path / "run", World(), settings=settings)
    if method == "load":
        run.tasks = Source("next", 4, error)  # type: ignore[assignment]
        with pytest.raises(rlkit.EnvironmentFault):
            run.train()
    run.tasks = Source(method, number, error)  # type: ignore[assignment]
    with pytest.raises(rlkit.EnvironmentFault, match=f"the task source of words failed: .*{error}"):
        run.train(resume=method == "load")
    run.tasks = Source("none", 1, error)  # type: ignore[assignment]
    run.train(resume=(run.directory / "run.json").exists())
    assert run.weights() == uninterrupted.weights()


def test_the_state_of_a_source_must_be_json(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run")
    source = Source("none", 1, RuntimeError())
    source.state_dict = lambda: {"seen": {1, 2}}  # type: ignore[dict-item,method-assign]  on purpose
    run.tasks = source  # type: ignore[assignment]
    with pytest.raises(rlkit.EnvironmentFault, match="the state of the task source of words is not JSON"):
        run.train()
