from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlkit._util import threads
from rlkit.rollout.task_guard import stop_leftover_tasks

from .conftest import left, write_task
from .environments import SlowToStop
from .verdicts import trial_verdict

pytestmark = [
    pytest.mark.usefixtures("can_sandbox"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]


async def rewards(task: Path, *, name: str = "local", trials_dir: Path | None = None) -> object:
    """The verdict on the task's solution."""
    return await trial_verdict(task, agent={"name": "oracle"}, place=name, trials_dir=trials_dir)


def test_the_verdict_does_not_wait_for_the_environment_to_go_and_the_run_does(
    cache: Path, task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlowToStop.stopped.clear()
    may_stop = asyncio.Event()
    monkeypatch.setattr(SlowToStop, "may_stop", may_stop)

    @stop_leftover_tasks()
    async def run() -> None:
        assert await rewards(task, name=f"{SlowToStop.__module__}:SlowToStop") == {"reward": 1.0}
        assert SlowToStop.stopped == []
        assert left(cache) != []
        asyncio.get_running_loop().call_later(0.2, may_stop.set)

    threads.run(run())
    assert len(SlowToStop.stopped) == 1
    assert left(cache) == []


def test_without_a_run_the_verdict_waits_for_the_environment_to_stop(cache: Path, task: Path) -> None:
    SlowToStop.stopped.clear()
    assert asyncio.run(rewards(task, name=f"{SlowToStop.__module__}:SlowToStop")) == {"reward": 1.0}
    assert len(SlowToStop.stopped) == 1


def test_a_cancelled_trial_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "slow", test="#!/bin/bash\nsleep 3600\n")

    @stop_leftover_tasks()
    async def run() -> None:
        playing = asyncio.create_task(rewards(task, trials_dir=tmp_path / "trials"))
        while not list((tmp_path / "trials").glob("*/agent/oracle.txt")):
            await asyncio.sleep(0.02)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    threads.run(run())
    assert list((tmp_path / "trials").iterdir()) == []
    assert left(cache) == []


def test_an_environment_that_fails_to_start_is_an_error_and_frees_its_gate(cache: Path, task: Path) -> None:
    async def main() -> list[object]:
        name = f"{SlowToStop.__module__}:NeverThere"
        return [await rewards(task, name=name) for _ in range(2)]

    assert asyncio.run(main()) == ["RuntimeError", "RuntimeError"]
