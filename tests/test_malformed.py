"""Mistakes of environments fail only their own rollouts, each with its message."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import rlkit
from rlkit._util.priority_semaphore import Slots
from rlkit.algorithms.datums import Preparation
from rlkit.algorithms.estimators import GroupMean
from rlkit.env import Task
from rlkit.policy import Limits
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.types import Episode, Group, Sampling
from tests.limits import HANG_S, wait_until
from tests.marks import split_slow

from .simulation import Simulation, Word

CONTEXT = 400
REWARDS = [1.0, 0.0, 0.0, 1.0]


class OddFirst(rlkit.Env):
    """Do something odd in the first rollout of a group only."""

    def __init__(self, odd: Callable[[rlkit.Policy], Awaitable[object]]) -> None:
        self.odd = odd
        self.played = 0

    async def rollout(self, policy: rlkit.Policy) -> float:
        number, self.played = self.played, self.played + 1
        if number == 0:
            return await self.odd(policy)  # type: ignore[return-value]  whatever it is
        await policy.chat([{"role": "user", "content": "hello"}])
        return REWARDS[number]


def play(env: rlkit.Env, *, timeout_s: float = HANG_S) -> Group:
    settings = EnvSettings(4, Sampling(max_tokens=16), timeout_s, 0, Limits(context_tokens=CONTEXT))
    sampler = ScriptedSampler(lambda prompt, *, seed: "hi", chat=ByteChat())
    player = Player(LocalRunner(ByteChat()), {"e": settings}, seed=0, slots=Slots(8))
    return asyncio.run(player.play(Task(0, "e", env), lambda: sampler))


def returning(value: object) -> Callable[[rlkit.Policy], Awaitable[object]]:
    async def odd(policy: rlkit.Policy) -> object:
        await policy.chat([{"role": "user", "content": "hello"}])
        return value

    return odd


async def says(policy: rlkit.Policy, text: str) -> float:
    await policy.chat([{"role": "user", "content": text}])
    return 1.0


async def never(policy: rlkit.Policy) -> float:
    await asyncio.Event().wait()
    return 1.0


async def cancels_itself(policy: rlkit.Policy) -> float:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
    return 1.0


async def forks(policy: rlkit.Policy) -> float:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return await says(policy, "forked")


async def prints(policy: rlkit.Policy) -> float:
    print("to the console")
    print("and to the other one", file=sys.stderr)
    return await says(policy, "printed")


class Raising:
    """Object whose every method raises."""

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __repr__(self) -> str:
        raise RuntimeError("no text either")


MATRIX: dict[str, tuple[Callable[[rlkit.Policy], Awaitable[object]], str]] = {
    "None": (returning(None), "returned NoneType None"),
    "NaN": (returning(math.nan), "rewards must be finite"),
    "infinite": (returning(math.inf), "rewards must be finite"),
    "text": (returning("1.0"), "returned str '1.0'"),
    "tensor": (returning(torch.tensor(1.0)), "returned Tensor"),
    "array": (returning(np.ones(1)), "returned ndarray"),
    "too many rewards": (returning([1.0, 0.0]), "returned list"),
    "complex": (returning(1j), "returned complex"),
    "raises in its repr": (returning(Raising()), "Raising whose repr raises RuntimeError"),
    "empty observation": (lambda policy: says_tokens(policy, []), "the prompt is empty"),
    "ten times too long": (lambda policy: says(policy, "x" * 10 * CONTEXT), f"fills the context of {CONTEXT}"),
    "raises": (lambda policy: raises(policy, RuntimeError("the tool broke")), "RuntimeError: the tool broke"),
    "exits": (lambda policy: raises(policy, SystemExit(3)), "SystemExit: 3"),
    "never returns": (never, "longer than 5 s"),
    "cancels itself": (cancels_itself, "cancelled its own rollout"),
}
FINE = {"bool": returning(True), "prints": prints, "forks": forks}


async def says_tokens(policy: rlkit.Policy, tokens: list[int]) -> float:
    await policy.sample(tokens)
    return 1.0


async def raises(policy: rlkit.Policy, error: BaseException) -> float:
    await policy.chat([{"role": "user", "content": "hello"}])
    raise error


@pytest.mark.parametrize("name", MATRIX)
def test_mistake_fails_only_its_rollout_and_does_not_change_other_advantages(name: str) -> None:
    odd, message = MATRIX[name]
    # Only what never returns waits for the limit; its siblings are done long before that.
    group = play(OddFirst(odd), timeout_s=5.0 if odd is never else HANG_S)
    assert [episode.status for episode in group.episodes] == ["failed", "completed", "completed", "completed"]
    assert message in (group.episodes[0].error or "")
    advantages = asyncio.run(Preparation({"e": GroupMean()}).prepare(group)).advantages
    without_failed = GroupMean().advantages(Group("e", "0", 0, group.episodes[1:]))
    assert not advantages[0].any()
    assert [row[0] for row in advantages[1:]] == without_failed.tolist()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", FINE)
def test_unusual_but_valid_results_are_accepted(name: str) -> None:
    group = play(OddFirst(FINE[name]))
    assert [episode.reward for episode in group.episodes] == [1.0, *REWARDS[1:]]


class Resource(Word):
    """Hold an open file during the rollout, and fail in many ways."""

    open_files = 0
    loop: ClassVar[asyncio.AbstractEventLoop]

    async def rollout(self, policy: rlkit.Policy) -> float:
        Resource.loop = asyncio.get_running_loop()
        with Path(os.devnull).open() as _:
            Resource.open_files += 1
            try:
                reply = await policy.chat([{"role": "user", "content": self.task_id}])
                if len(reply.text) % 5 == 0:
                    raise RuntimeError("broken")
                await asyncio.sleep(len(reply.text))
                return float(reply.text.count("e"))
            finally:
                Resource.open_files -= 1


def count_resources() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    gc.collect()
    # The pool of rlkit's own threads grows as it likes.
    names = [thread.name for thread in threading.enumerate() if not thread.name.startswith("rlkit_")]
    return len(list(Path("/proc/self/fd").iterdir())), len(names)


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
@pytest.mark.parametrize(
    "end", split_slow(["success", "error", "interrupt", "cancellation"], lambda end: end == "error")
)
@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_run_leaves_no_files_and_threads(end: str, mode: str, tmp_path: Path) -> None:
    def run(name: str) -> None:
        stop = rlkit.StopSignal()
        simulation = Simulation(tmp_path / name, tasks=[Resource(number) for number in range(40)])
        simulation.settings = {"schedule": {"mode": mode}, "steps": 4}
        if end == "error":
            simulation.tasks = [*simulation.tasks[:4], *[Broken(number) for number in range(30)]]
        if end == "interrupt":
            stop.request()
        if end == "cancellation":
            # told in a thread of the tracker's own
            simulation.ears.on_step = lambda step, metrics: Resource.loop.call_soon_threadsafe(cancel_all)  # type: ignore[method-assign]  a test listens in
        expected = {"error": rlkit.RunFailed, "cancellation": asyncio.CancelledError}.get(end)
        if expected is None:
            simulation.train(stop=stop)
        else:
            with pytest.raises(expected):
                simulation.train()

    run("first")  # what is imported and started once does not count
    resources_before = count_resources()
    run("second")
    # Threads of tests before this one may open and close files of theirs; what a run leaves behind stays.
    wait_until(
        lambda: all(now <= then for now, then in zip(count_resources(), resources_before, strict=True)),
        why=lambda: (count_resources(), resources_before),
    )
    assert Resource.open_files == 0


class Broken(Word):
    async def rollout(self, policy: rlkit.Policy) -> float:
        raise RuntimeError("broken for good")


def cancel_all() -> None:
    for task in asyncio.all_tasks():
        if "timed" in repr(task.get_coro()):
            task.cancel()


def test_failed_episode_keeps_its_turns() -> None:
    group = play(OddFirst(MATRIX["raises"][0]))
    failed: Episode = group.episodes[0]
    assert len(failed.turns) == 1
    assert failed.reward is None
