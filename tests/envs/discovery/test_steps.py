from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from rlkit.envs.discovery import discovery
from rlkit.envs.discovery.erdos import Erdos
from rlkit.envs.discovery.problem import published
from rlkit.envs.discovery.scripted import PROGRAMS, reply
from rlkit.envs.discovery.steps import c5, descend, linear_programs, mirrored, polish, search, upsample
from rlkit.errors import MissingError
from rlkit.testing import ScriptedPolicy

pytest.importorskip("scipy")


def beginning(seed: int, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return mirrored(np.clip(0.5 + np.random.default_rng(seed).uniform(-0.4, 0.4, count), 0, 1))


def test_one_descent_on_50_pieces_is_already_good() -> None:
    found = descend(beginning(0, 50), iterations=1500, symmetric=True)
    assert Erdos().verified(found).value < 0.3815


def test_linear_programs_improve_what_a_descent_has_found() -> None:
    h = descend(beginning(1, 30), iterations=300, symmetric=True)
    better = linear_programs(h, end_s=time.process_time() + 20, symmetric=True, most=30)
    assert c5(better) < c5(h) - 1e-6
    assert better.sum() == pytest.approx(15)
    np.testing.assert_allclose(better, better[::-1], atol=1e-9)


def test_a_few_linear_programs_improve_the_construction_of_ttt_discover() -> None:
    h = Erdos().verified(published("erdos_ttt_discover_2026")).construction
    better = linear_programs(h, end_s=time.process_time() + 60, symmetric=False, radius=1e-3, most=2)
    proven = Erdos().certificate(Erdos().verified(better).construction)
    assert float(proven.bound) < 0.3808753


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_polished_construction_is_valid_and_no_worse(symmetric: bool) -> None:
    h = np.random.default_rng(3).uniform(0.1, 0.9, 12)
    h = mirrored(h) if symmetric else h
    before = Erdos().verified(h).value
    assert Erdos().verified(polish(h, 1.0)).value <= before


def test_finer_pieces_are_the_same_function() -> None:
    h = beginning(2, 10)
    assert c5(upsample(h, 4)) == pytest.approx(c5(h), abs=1e-15)


def test_a_search_tells_each_improvement_and_returns_the_best() -> None:
    told = list[float]()
    found = search(0, 3.0, start=20, rungs=(2,), told=lambda seconds, h: told.append(c5(h)))
    assert told == sorted(told, reverse=True)
    assert c5(found) == min(told)
    assert Erdos().verified(found).value < 0.3835


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_scripted_program_is_played_like_a_models(name: str) -> None:
    task = discovery(start="erdos_haugland_2016", program_timeout_s=2.0, workers=2).next()
    try:
        outcome = asyncio.run(task.rollout(ScriptedPolicy([reply(name)])))
    except MissingError as error:
        pytest.skip(str(error))
    if outcome.info["end"] == "timeout":  # on a machine that is busy with other things
        return
    assert outcome.info["end"] == "valid", outcome.info
    assert outcome.metrics["value"] < 0.39
