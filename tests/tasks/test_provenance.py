"""A resumed run creates its tasks from the values recorded at its start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlkit.config.loading.load import load_config
from rlkit.errors import UsageError
from rlkit.tasks.provenance import read_manifest, write_manifest
from rlkit.testing import ByteChat, SimulatedTinker, run_virtual
from rlkit.training.trainer import RLTrainer
from rlkit.types import Json
from tests.simulation import Word

MADE_OF: list[Json] = []
"""What the environment below was told that its tasks were made of, at each loading."""


def make_words(size: int, pin: Callable[[Json], Json]) -> list[Word]:
    MADE_OF.append(pin({"size": size}))
    return [Word(1), Word(2)]


def train(directory: Path, size: int, *, resume: bool = False, steps: int = 1) -> None:
    place = "tests.tasks.test_provenance:make_words"
    settings = {
        "model": "simulated",
        "envs": {"words": {"env": place, "args": {"size": size}}},
        "eval": {"envs": {"held_out": {"env": place, "args": {"size": -size}, "tasks": 2}}},
        "batch": {"groups": 2, "group_size": 2},
        "steps": steps,
    }
    trainer = RLTrainer(
        load_config([], settings=settings),  # pyright: ignore[reportArgumentType]  JSON
        directory=directory,
        resume=resume,
        service=SimulatedTinker(),
        chat=ByteChat(),
    )
    run_virtual(trainer.train())


def test_resumed_environment_gets_the_recorded_values(tmp_path: Path) -> None:
    MADE_OF.clear()
    train(tmp_path / "run", 1)
    train(tmp_path / "run", 2, resume=True, steps=2)
    train(tmp_path / "other", 3)
    # The evaluation is loaded first.
    assert MADE_OF == [{"size": -1}, {"size": 1}, {"size": -1}, {"size": 1}, {"size": -3}, {"size": 3}]
    pinned = json.loads((tmp_path / "run" / "tasks.json").read_text())
    assert pinned == {"eval.envs.held_out": {"size": -1}, "envs.words": {"size": 1}}


def test_run_without_pins_removes_the_record_of_an_earlier_run(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"envs.words": {"size": 1}})
    write_manifest(tmp_path, {})
    assert not (tmp_path / "tasks.json").exists()


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_record_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tasks.json").write_text(content)
    with pytest.raises(UsageError, match=r"tasks\.json"):
        read_manifest(tmp_path)
