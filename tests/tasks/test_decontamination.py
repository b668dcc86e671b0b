"""What is measured is never trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import rlkit
from rlkit.errors import UsageError
from rlkit.tasks.decontamination import contents, kept_apart
from rlkit.trackers import Broadcast
from rlkit.training.trainer import RLTrainer


@dataclass(frozen=True)
class Asks(rlkit.Env):
    content: str

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


class Notes(Broadcast):
    def __init__(self) -> None:
        super().__init__([])
        self.told = list[str]()

    def note(self, message: str) -> None:
        self.told.append(message)


def test_tasks_that_ask_what_is_evaluated_are_left_out_and_those_that_do_not_say_stay() -> None:
    silent = Silent()
    asked = contents({"held_out": [*held_out(), silent]})
    assert asked == {"two": "held_out", "four": "held_out"}
    assert kept_apart([*TRAINED, silent], asked, field="envs.x") == [TRAINED[0], TRAINED[2], silent]


def test_where_nothing_is_left_both_environments_are_named() -> None:
    with pytest.raises(UsageError, match=r"envs\.x: all of its 3 tasks are evaluated too, as eval\.envs\.held_out"):
        kept_apart(TRAINED, contents({"held_out": TRAINED}), field="envs.x")


def test_a_run_leaves_them_out_and_says_how_many(tmp_path: Path) -> None:
    def trainer(name: str) -> tuple[RLTrainer, Notes]:
        notes = Notes()
        config = rlkit.Config.model_validate(
            {"model": "simulated", "envs": {"x": {}}, "eval": {"envs": {"y": {"env": f"{__file__}:{name}"}}}}
        )
        return RLTrainer(config, envs={"x": TRAINED}, trackers=[notes], directory=tmp_path), notes

    made, notes = trainer("held_out")
    assert notes.told == ["envs.x: 1 tasks are evaluated, and not trained on"]
    asked = {task.env.content for task in made._tasks.draw(4) if isinstance(task.env, Asks)}  # pyright: ignore[reportPrivateUsage]
    assert asked == {"one", "three"}
    with pytest.raises(UsageError, match="all of its 3 tasks"):
        trainer("everything")
