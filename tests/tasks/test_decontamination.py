"""Evaluated tasks are never trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

import rlkit
from rlkit.errors import UsageError
from rlkit.tasks.from_config import remove_evaluated, task_contents
from tests.simulation import Simulation


@dataclass(frozen=True)
class Asks(rlkit.Env):
    content: str

    @property
    def task_id(self) -> str:
        return self.content

    async def rollout(self, policy: rlkit.Policy) -> float:
        return 0.0


class Silent(rlkit.Env):
    async def rollout(self, policy: rlkit.Policy) -> float:
        return 0.0


TRAINED = [Asks("one"), Asks("two"), Asks("three")]


def held_out() -> list[Asks]:
    return [Asks("two"), Asks("four")]


def everything() -> list[Asks]:
    return TRAINED


def test_evaluated_tasks_are_removed_and_tasks_without_content_stay() -> None:
    silent = Silent()
    contents = task_contents({"held_out": [*held_out(), silent]})
    assert contents == {"two": "held_out", "four": "held_out"}
    assert remove_evaluated([*TRAINED, silent], contents, field="envs.x") == [TRAINED[0], TRAINED[2], silent]


def test_removing_all_tasks_is_an_error_that_names_both_environments() -> None:
    with pytest.raises(UsageError, match=r"envs\.x: all of its 3 tasks are evaluated too, as eval\.envs\.held_out"):
        remove_evaluated(TRAINED, task_contents({"held_out": TRAINED}), field="envs.x")


def test_run_removes_evaluated_tasks_and_notes_their_number(tmp_path: Path) -> None:
    def simulation(evaluated: str) -> Simulation:
        settings = {"eval": {"envs": {"y": {"env": f"{__file__}:{evaluated}"}}}}
        return Simulation(tmp_path / evaluated, settings=settings, tasks=TRAINED)

    run = simulation("held_out")
    assert run.train().status == "completed"
    assert "envs.words: 1 tasks are evaluated, and not trained on" in run.ears.notes
    assert set(pd.read_parquet(run.directory / "episodes").task) == {"one", "three"}
    with pytest.raises(UsageError, match="all of its 3 tasks"):
        simulation("everything").train()
