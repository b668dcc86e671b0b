"""The example whose replies choose programs from templates."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest

import rlkit
from rlkit.config.loading.objects import load_object
from rlkit.envs.discovery.problems.erdos import Erdos
from rlkit.envs.discovery.source import Discovery
from rlkit.envs.discovery.state import State
from rlkit.sandbox.inside import landlock, program_filter
from rlkit.store.history import load_history
from rlkit.testing import ScriptedPolicy

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's protection is Linux's"),
    pytest.mark.skipif(
        not landlock.version() or program_filter.program() is None, reason="programs would not be kept apart"
    ),
]


def load(name: str) -> object:
    return load_object(f"{ROOT}/examples/erdos_templates.py:{name}", field="env")


CHOICES = cast("Mapping[str, Sequence[object]]", load("CHOICES"))
CHANGES, _, PIECES, DESCENTS, STEPS = CHOICES.values()
BALANCE = DESCENTS.index("balance(h)")
write_program = cast("Callable[[Sequence[int]], str]", load("write_program"))

TEMPLATES = [
    *[(change, 1, 0, BALANCE, 0) for change in range(len(CHANGES))],
    *[(0, 0, pieces, BALANCE, 0) for pieces in range(len(PIECES))],
    *[(0, 0, 0, descent, steps) for descent in range(len(DESCENTS)) for steps in range(len(STEPS))],
]


@pytest.fixture(scope="module")
def search() -> Discovery:
    make_search = load("templates")
    assert callable(make_search)
    return cast("Discovery", make_search())


def play(search: Discovery, tokens: Sequence[int]) -> rlkit.Outcome:
    return asyncio.run(search.next().rollout(ScriptedPolicy(["".join(map(chr, tokens))])))


@pytest.mark.parametrize("tokens", TEMPLATES, ids=str)
def test_a_template_makes_a_program_that_runs(search: Discovery, tokens: Sequence[int]) -> None:
    outcome = play(search, tokens)
    program = str(outcome.info["program"])
    assert program.strip() == write_program(tokens).strip()
    ends = {"valid", "error"} if "rate=5" in program else {"valid"}  # so great a rate may overflow
    assert str(outcome.info["end"]) in ends, outcome.info["why"]


def test_a_change_out_of_range_needs_a_descent_that_moves_it_back(search: Discovery) -> None:
    change = CHANGES.index("part += 1")
    bare, balanced = (play(search, (change, 1, 0, descent, 0)) for descent in (0, BALANCE))
    assert (bare.reward, bare.info["end"]) == (0, "invalid")
    assert balanced.info["end"] == "valid"


def test_a_copy_of_the_start_has_no_reward(search: Discovery) -> None:
    copy, descent = (play(search, (0, 0, 0, number, 1)) for number in (BALANCE, len(DESCENTS) - 1))
    assert (copy.reward, copy.metrics["valid"], copy.metrics["improved"]) == (0, 1, 0)
    assert (descent.reward, descent.metrics["improved"]) == (1 / descent.metrics["value"], 1)


def test_a_token_chooses_by_its_number_modulo_the_choices() -> None:
    tokens = [3, 2, 1, 6, 1]
    wrapped = [token + 2 * len(options) for token, options in zip(tokens, CHOICES.values(), strict=True)]
    assert write_program(wrapped) == write_program(tokens)
    assert write_program(tokens[:3]) == write_program([*tokens[:3], 0, 0])


def test_what_an_untrained_model_chooses_runs_and_is_verified_and_trained_on(
    byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    monkeypatch.chdir(ROOT)
    batch = {"groups": 2, "group_size": 8}
    path = ROOT / "examples" / "erdos_templates.yaml"
    result = rlkit.train(path, model=str(byte_model_dir), steps=2, batch=batch, trackers=[])
    history = load_history(result.directory)
    episodes = [episode for step in (1, 2) for group in history.groups(step) for episode in group.group.episodes]
    assert len(episodes) == 32
    assert len({episode.info["program"] for episode in episodes}) > 16
    values = list[float]()
    for episode in episodes:
        assert str(episode.info["program"]).strip() == write_program(episode.turns[0].completion.tolist()).strip()
        if "child" in episode.info:
            child = State.from_json(episode.info["child"])  # pyright: ignore[reportArgumentType]
            values.append(Erdos().verify(child.construction).value)
            assert episode.reward == (1 / values[-1] if episode.metrics["improved"] else 0)
    assert len(values) > 8
    assert result.metrics["env/erdos/tasks/best"] <= min(values)
    assert result.metrics["optim/sequences"] > 0
