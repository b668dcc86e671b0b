"""What holds up everything else is told of rollouts, and of nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine

import pytest

from rlkit.cli.common import held
from rlkit.cli.common.held import ended_if_held
from rlkit.rollout.task_guard import contained

LIMIT_S = 0.5


def told_of(*playing: Coroutine[object, object, object], first_s: float = 0.0, limit_s: float = LIMIT_S) -> list[str]:
    """What is told while these play, after something else that takes long."""
    told = list[str]()

    async def main() -> None:
        with ended_if_held(limit_s, told.append):
            await asyncio.sleep(0)
            time.sleep(first_s)
            await asyncio.gather(*(asyncio.create_task(contained(one)) for one in playing))

    asyncio.run(main())
    return told


async def grading(seconds: float) -> None:
    time.sleep(seconds)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "_LOOK_S", 0.02)


def test_a_rollout_that_does_not_let_go_is_told_with_its_place() -> None:
    (told,) = told_of(grading(4 * LIMIT_S))
    assert told.startswith("a rollout held up everything else for more than 0.5 s (timeout_s), at ")
    assert told.endswith("test_held.py:33, in grading")


def test_rollouts_that_take_turns_are_let_go_on() -> None:
    # A limit that a busy machine does not make one of them reach.
    assert told_of(*(grading(0.15) for _ in range(15)), limit_s=2.0) == []


def test_what_is_no_rollout_may_take_long() -> None:
    assert told_of(grading(0.0), first_s=2 * LIMIT_S) == []
