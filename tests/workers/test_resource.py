from __future__ import annotations

import asyncio
import gc
import os
import pickle
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import rlkit
from rlkit._util.priority_semaphore import Slots
from rlkit.env import Task
from rlkit.policy import Limits
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner, RolloutRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.types import Group, Sampling
from rlkit.workers.local import LocalWorker
from rlkit.workers.pool import WorkerPool


class Log:
    """A costly object that writes its life into a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[str]:
        if not self.path.exists():
            self.path.write_text("")
            raise OSError("the first time, it cannot be opened")
        self._write("open")
        try:
            yield str(os.getpid())
        finally:
            await asyncio.sleep(0.01)
            self._write("closed")

    def _write(self, word: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{word} {os.getpid()}\n")


class Uses(rlkit.Env):
    def __init__(self, resource: rlkit.WorkerResource[str]) -> None:
        self.resource = resource

    async def rollout(self, policy: rlkit.Policy) -> float:
        assert await self.resource.get() == str(os.getpid())
        return 1.0


async def play(runner: RolloutRunner, env: rlkit.Env) -> Group:
    settings = EnvSettings(8, Sampling(max_tokens=16), 60, 8, Limits())
    player = Player(runner, {"e": settings}, seed=0, slots=Slots(16))
    sampler = ScriptedSampler(lambda prompt, *, seed: "hi", chat=ByteChat())
    return await player.play(Task(0, "e", env), lambda: sampler)


def test_an_object_is_made_once_and_closed_at_the_end_of_the_run(tmp_path: Path) -> None:
    @stop_leftover_tasks()
    async def run() -> Group:
        return await play(LocalRunner(ByteChat()), Uses(rlkit.WorkerResource(Log(tmp_path / "log"))))

    assert asyncio.run(run()).rewards.tolist() == [1.0] * 8  # those that shared the failed attempt are played again
    assert (tmp_path / "log").read_text() == f"open {os.getpid()}\nclosed {os.getpid()}\n"
    asyncio.run(run())  # on another event loop
    assert len((tmp_path / "log").read_text().splitlines()) == 4


def test_each_worker_makes_an_object_of_its_own(tmp_path: Path) -> None:
    async def run() -> Group:
        runner, env = LocalRunner(ByteChat()), Uses(rlkit.WorkerResource(Log(tmp_path / "log")))
        task = Task(0, "e", env)
        workers = WorkerPool(2, LocalWorker, runner, tasks=[task], show=lambda env, line: None)
        async with workers.open() as pool:
            return await play(pool, env)

    (tmp_path / "log").write_text("")
    assert asyncio.run(run()).rewards.tolist() == [1.0] * 8
    lines = (tmp_path / "log").read_text().splitlines()
    processes = {line.split()[1] for line in lines}
    assert len(processes) == 2
    assert str(os.getpid()) not in processes
    assert sorted(lines) == sorted(f"{word} {process}" for word in ("open", "closed") for process in processes)


def test_a_pickled_resource_is_not_open() -> None:
    resource = rlkit.WorkerResource(Log(Path("x")))
    copy: rlkit.WorkerResource[str] = pickle.loads(pickle.dumps(resource))
    assert isinstance(copy, rlkit.WorkerResource)


def test_an_unfinished_opening_is_shared() -> None:
    opened = list[int]()

    @asynccontextmanager
    async def slow() -> AsyncGenerator[int]:
        await asyncio.sleep(0.01)
        opened.append(1)
        yield 7

    async def run() -> list[int]:
        resource = rlkit.WorkerResource(slow)
        return await asyncio.gather(*(resource.get() for _ in range(3)))

    assert asyncio.run(run()) == [7] * 3
    assert opened == [1]


def test_an_object_stays_open_outside_a_run(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.path.write_text("")
    resource = rlkit.WorkerResource(log)

    async def main() -> str:
        await resource.get()
        gc.collect()
        await asyncio.sleep(0.05)
        return log.path.read_text()

    assert asyncio.run(main()) == f"open {os.getpid()}\n"
    assert log.path.read_text() == f"open {os.getpid()}\nclosed {os.getpid()}\n"
