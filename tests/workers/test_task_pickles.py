"""A task travels once to each worker, and is forgotten with its group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakSet

import pytest

import rlkit
from rlkit._util.priority_semaphore import Slots
from rlkit.env import GroupScorer, Task
from rlkit.rollout.player import Player
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.types import Episode, Outcome
from rlkit.workers.connection import Connection, WorkerOwner
from rlkit.workers.local import LocalWorker
from rlkit.workers.task_pickles import TaskPickle, pickle_task
from tests.workers.helpers import make_settings, opened_pool, play, reply

SIZE = 2**20


class Large(rlkit.Env):
    """Reports how many objects of its class the process has loaded and not forgotten."""

    loaded: ClassVar = WeakSet[rlkit.Env]()

    def __init__(self) -> None:
        self.data = b"x" * SIZE

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        Large.loaded.add(self)

    async def rollout(self, policy: rlkit.Policy) -> Outcome:
        await policy.chat([{"role": "user", "content": "begin"}])
        return Outcome(float(len(self.data)), info={"loaded": len(Large.loaded)})


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_gets_a_task_once_and_forgets_it_with_its_group(workers: int) -> None:
    frames = list[int]()

    def connect(owner: WorkerOwner) -> Connection:
        worker = LocalWorker(owner)
        send = worker.send

        def send_counted(frame: bytes) -> None:
            frames.append(len(frame))
            send(frame)

        worker.send = send_counted
        return worker

    async def main() -> None:
        tasks = [Task(draw, "e", Large()) for draw in range(3)]
        async with opened_pool(workers, tasks[:1], connect=connect) as pool:
            player = Player(pool, {"e": make_settings(group_size=8)}, seed=0, slots=Slots(99))
            sampler = ScriptedSampler(reply, chat=ByteChat())
            for task in tasks:
                group = await player.play(task, lambda: sampler)
                assert group.rewards.tolist() == [SIZE] * 8
                assert [episode.info["loaded"] for episode in group.episodes] == [1] * 8

    asyncio.run(main())
    assert sum(size > SIZE for size in frames) == workers * (1 + 3)  # the first is a test of the task


def test_a_task_is_pickled_once_for_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = list[int]()

    def pickle_task_counted(task: Task) -> TaskPickle:
        pickled.append(task.draw)
        return pickle_task(task)

    monkeypatch.setattr("rlkit.workers.pool.pickle_task", pickle_task_counted)
    envs = {f"e{number}": Remembers() for number in range(6)}
    assert play(envs, 1).groups["e5"].rewards.tolist() == [0.0] * 4  # with a score
    assert sorted(pickled) == sorted(2 * list(range(6)))  # the first is a test of the task


SETTINGS = {"is_changed": False}


class Remembers(GroupScorer):
    """Reports which changes of its rollouts and of its module reach the scores of the group."""

    was_played = False

    async def rollout(self, policy: rlkit.Policy) -> float:
        self.was_played = True
        return 0.0

    async def score_group(self, episodes: Sequence[Episode]) -> list[float]:
        return [1.0 * self.was_played + 2.0 * SETTINGS["is_changed"]] * len(episodes)


@pytest.mark.parametrize(("workers", "score"), [(0, 3.0), (1, 0.0)])
def test_workers_lose_changes_of_a_task_and_do_not_see_those_of_a_module(
    workers: int, score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "is_changed", True)
    assert play({"e": Remembers()}, workers).groups["e"].rewards.tolist() == [score] * 4
