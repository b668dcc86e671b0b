from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.envs.discovery import PROBLEMS, discovery
from rlkit.envs.discovery.problem import Construction, Problem, load_published
from rlkit.envs.discovery.problems import autocorrelation_steps, packing_steps, subset_steps
from rlkit.envs.discovery.problems.autocorrelation import (
    FirstAutocorrelation,
    SecondAutocorrelation,
    ThirdAbsoluteAutocorrelation,
    ThirdAutocorrelation,
)
from rlkit.envs.discovery.problems.autocorrelation_steps import Objective
from rlkit.envs.discovery.problems.erdos import Erdos
from rlkit.envs.discovery.problems.erdos_interior import interior_point
from rlkit.envs.discovery.problems.erdos_steps import balance, c5, linear_programs, polish, search
from rlkit.envs.discovery.problems.packing import CirclePacking
from rlkit.envs.discovery.problems.subsets import Kissing, NoIsosceles
from rlkit.errors import MissingError
from rlkit.testing import ScriptedPolicy
from tests.envs.discovery.scripted import PROGRAMS, CallCounter, make_reply
from tests.limits import HANG_S
from tests.marks import split_slow

pytest.importorskip("scipy")


def beginning(seed: int, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    h = np.clip(0.5 + np.random.default_rng(seed).uniform(-0.4, 0.4, count), 0, 1)
    return (h + h[::-1]) / 2


def test_one_descent_on_50_pieces_is_already_good() -> None:
    heights = interior_point(beginning(0, 50), centre=0, barrier=1e-3)
    assert Erdos().verify(balance(heights)).value < 0.383


def test_linear_programs_improve_a_descended_construction() -> None:
    h = balance(interior_point(beginning(1, 30), centre=0, steps=10))
    better = linear_programs(h, end_s=time.process_time() + HANG_S, symmetric=True)
    assert c5(better) < c5(h) - 1e-6
    assert better.sum() == pytest.approx(15)
    np.testing.assert_allclose(better, better[::-1], atol=1e-9)


def test_a_few_linear_programs_improve_the_construction_of_ttt_discover() -> None:
    h = Erdos().verify(load_published("erdos_ttt_discover_2026")).construction
    better = linear_programs(h, end_s=time.process_time() + 1.0, symmetric=False, radius=1e-3)
    proven = Erdos().certificate(Erdos().verify(better).construction)
    assert float(proven.bound) < 0.3808753


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_polished_construction_is_valid_and_no_worse(symmetric: bool) -> None:
    h = np.random.default_rng(3).uniform(0.1, 0.9, 12)
    h = (h + h[::-1]) / 2 if symmetric else h
    before = Erdos().verify(h).value
    assert Erdos().verify(polish(h, 1.0)).value <= before


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=40), st.floats(-1e-9, 1e-9))
def test_balanced_heights_pass_the_verifier_unchanged(heights: list[float], off: float) -> None:
    balanced = balance(np.clip(balance(np.array(heights)) + off, 0, 1))
    assert Erdos().verify(balanced).value == pytest.approx(c5(balanced), abs=1e-12)


def test_finer_pieces_are_the_same_function() -> None:
    h = beginning(2, 10)
    assert c5(np.repeat(h, 4)) == pytest.approx(c5(h), abs=1e-15)


def test_a_search_reports_each_improvement_and_returns_the_best() -> None:
    improvements = list[float]()
    best_heights = search(0, 3.0, pieces=40, on_best=lambda seconds, h: improvements.append(c5(h)))
    assert improvements == sorted(improvements, reverse=True)
    assert c5(best_heights) == min(improvements)
    assert Erdos().verify(best_heights).value < 0.383


def test_a_search_refines_coarse_step_functions() -> None:
    for seconds in (4.0, 16.0, 64.0):  # on busy processors, the time may end before the fine functions
        improvements = list[tuple[int, float]]()

        def record(_: float, heights: Construction, improvements: list[tuple[int, float]] = improvements) -> None:
            improvements.append((len(heights), c5(heights)))

        best_heights = search(0, seconds, pieces=101, on_best=record)
        counts, values = [count for count, _ in improvements], [value for _, value in improvements]
        assert counts == sorted(counts)
        assert values == sorted(values, reverse=True)
        if set(counts) == {50, 100}:
            assert (len(best_heights), c5(best_heights)) == improvements[-1]
            return
    pytest.fail("no fine function was better than the coarse ones")


def note_process(folder: Path, _: float, heights: Construction) -> None:
    with (folder / f"{os.getpid()}").open("a") as file:
        file.write(f"{len(heights)} {c5(heights)!r}\n")


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessPoolExecutor]:
    """Two processes with one thread each: those of their libraries would wait for each other most of the time.

    A call has a process of its own; otherwise the first process could take both seeds before the second has started.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as processes:
        yield processes


def test_processes_repeat_a_search_of_one_process(executor: ProcessPoolExecutor) -> None:
    run_search = partial(search, 0, 10, pieces=100, clock=CallCounter(), processes=2)
    expected = executor.submit(run_search).result()
    assert Erdos().verify(expected).value < 0.383
    np.testing.assert_array_equal(run_search(run=executor.map), expected)


def test_all_processes_continue_from_the_best_of_their_islands(executor: ProcessPoolExecutor, tmp_path: Path) -> None:
    note = partial(note_process, tmp_path)
    best_heights = search(0, 20, pieces=192, on_best=note, clock=CallCounter(), processes=2, run=executor.map)
    processes = [[line.split() for line in path.read_text().splitlines()] for path in tmp_path.iterdir()]
    coarse, fine = (
        [min(float(value) for _, value in lines) for lines in processes if is_fine == (lines[0][0] == "192")]
        for is_fine in (False, True)
    )
    assert len(coarse) == 2
    assert c5(best_heights) == min(fine)  # a process notes nothing if it finds nothing better than the best island
    assert max(fine) < min(coarse)


@pytest.mark.slow
def test_a_search_from_a_published_construction_is_better_than_it() -> None:
    start = np.repeat(Erdos().verify(load_published("erdos_haugland_2016")).construction, 2)
    improvements = list[float]()
    best_heights = search(0, 3.0, starts=[start], on_best=lambda seconds, h: improvements.append(c5(h)))
    assert len(best_heights) == len(start)
    assert c5(best_heights) == min(improvements) < c5(start) - 1e-7


@pytest.mark.parametrize(
    ("problem", "name"),
    split_slow(
        [(problem, name) for problem in PROGRAMS for name in PROGRAMS[problem]],
        lambda case: case[1] == next(iter(PROGRAMS[case[0]])),
    ),
)
def test_a_scripted_program_is_played_like_a_sampled_program(problem: str, name: str) -> None:
    start = "erdos_haugland_2016" if problem == "erdos" else "random"
    task = discovery(problem=problem, start=start, program_timeout_s=2.0, workers=2).next()
    try:
        outcome = asyncio.run(task.rollout(ScriptedPolicy([make_reply(name, problem)])))
    except MissingError as error:
        pytest.skip(str(error))
    if outcome.info["end"] == "timeout":  # on a machine that is busy with other things
        return
    assert outcome.info["end"] == "valid", outcome.info
    if problem == "erdos":
        assert outcome.metrics["value"] < 0.39
    else:
        assert outcome.metrics["improved"] == 1


def test_every_problem_has_programs() -> None:
    assert set(PROGRAMS) == set(PROBLEMS)


HELPERS: list[tuple[Problem, Callable[[Construction, float], Construction]]] = [
    (Erdos(), polish),
    (FirstAutocorrelation(), autocorrelation_steps.polish_first),
    (SecondAutocorrelation(), autocorrelation_steps.polish_second),
    (ThirdAutocorrelation(), autocorrelation_steps.polish_third),
    (ThirdAbsoluteAutocorrelation(), autocorrelation_steps.polish_third_absolute),
    (CirclePacking(4), packing_steps.polish_square),
    (CirclePacking(4, region="rectangle"), packing_steps.polish_rectangle),
    (CirclePacking(4, region="circle"), packing_steps.polish_circle),
    (Kissing(8), subset_steps.polish_kissing),
    (NoIsosceles(), subset_steps.polish_isosceles),
]


@pytest.mark.parametrize(("problem", "helper"), HELPERS, ids=[problem.name for problem, _ in HELPERS])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_helper_returns_a_valid_construction_that_is_no_worse(
    problem: Problem, helper: Callable[[Construction, float], Construction], seed: int
) -> None:
    start = problem.start(np.random.default_rng(seed))
    before, now = problem.verify(start).value, problem.verify(helper(start, 0.1)).value
    assert problem.is_better(now, before)
    again = problem.verify(helper(problem.verify(start).construction, 0.0)).value
    assert not problem.is_better(before, again)


@pytest.mark.parametrize("problem", [helper for helper, _ in HELPERS], ids=lambda helper: helper.name)
def test_a_problem_names_its_helper_function(problem: Problem) -> None:
    assert problem.polish is not None
    module, _, function = problem.polish.partition(":")
    assert getattr(importlib.import_module(module), function) in [helper for _, helper in HELPERS]


def test_polish_rescales_heights_like_the_verifier() -> None:
    h = np.random.default_rng(5).uniform(0.1, 0.4, 12)
    assert Erdos().verify(polish(h, 0.0)).value == pytest.approx(Erdos().verify(h).value, abs=1e-12)


def test_coinciding_and_outlying_circles_are_separated() -> None:
    for circles in (np.full((6, 3), 0.5), np.full((6, 3), 9.0), np.zeros((6, 3))):
        packing = CirclePacking(6).verify(packing_steps.polish_square(circles, 0.5))
        assert packing.value > 1.0


def test_a_packing_of_two_is_optimal() -> None:
    start = CirclePacking(2).start(np.random.default_rng(0))
    assert CirclePacking(2).verify(packing_steps.polish_square(start, 1.0)).value == pytest.approx(2 - 2**0.5, abs=1e-9)


def test_a_search_for_packings_reports_each_improvement() -> None:
    improvements = list[float]()
    best_circles = packing_steps.search(
        0, 1.0, count=8, on_best=lambda seconds, circles: improvements.append(circles[:, 2].sum())
    )
    assert improvements == sorted(improvements)
    assert CirclePacking(8).verify(best_circles).value == pytest.approx(improvements[-1], abs=1e-9)
    assert improvements[-1] > 1.2


def test_local_search_improves_the_published_second_autocorrelation() -> None:
    problem = SecondAutocorrelation()
    published = problem.verify(load_published("ac2_alphaevolve_2025")).construction
    better = problem.verify(autocorrelation_steps.polish_second(published, 2.0))
    assert better.value > 0.8964 > problem.verify(published).value


@pytest.mark.parametrize("objective", ["first", "second", "third", "third_absolute"])
@pytest.mark.parametrize("count", [6, 240, 700])
def test_descents_follow_the_gradient_of_the_value(objective: Objective, count: int) -> None:
    f = np.random.default_rng(count).uniform(0.5, 1, count)
    descended = autocorrelation_steps.descend(f, iterations=30, objective=objective)
    before, after = (autocorrelation_steps.loss(heights, objective=objective) for heights in (f, descended))
    assert after < before - 0.01


def test_a_search_for_autocorrelations_reports_each_improvement() -> None:
    improvements = list[float]()
    autocorrelation_steps.search(
        0,
        1.0,
        objective="second",
        start=20,
        on_best=lambda seconds, f: improvements.append(autocorrelation_steps.compute_value(f, "second")),
    )
    assert improvements == sorted(improvements)
    assert improvements[-1] > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["third", "third_absolute"])
def test_a_search_of_signed_functions_is_better_than_unsigned_ones(objective: Objective) -> None:
    f = autocorrelation_steps.search(0, 4.0, objective=objective, start=30)
    assert f.min() < 0
    assert autocorrelation_steps.compute_value(f, objective) < 1.5


@pytest.mark.parametrize("objective", ["third", "third_absolute"])
def test_linear_programs_improve_a_published_signed_function(objective: Objective) -> None:
    name = "ac3_alphaevolve_2025" if objective == "third" else "ac3_absolute_alphaevolve_2025"
    f = load_published(name)
    better = autocorrelation_steps.linear_programs(f, end_s=time.process_time() + 1.0, objective=objective)
    published, polished = (autocorrelation_steps.compute_value(heights, objective) for heights in (f, better))
    assert polished < published


def test_two_circles_fill_a_rectangle() -> None:
    problem = CirclePacking(2, region="rectangle")
    start = problem.start(np.random.default_rng(0))
    assert problem.verify(packing_steps.polish_rectangle(start, 3.0)).value == pytest.approx(2 / 3, abs=1e-6)


@pytest.mark.parametrize(("count", "optimum"), [(1, 1.0), (2, 1.0), (3, 3 * (2 * 3**0.5 - 3)), (4, 5 / 3), (7, 7 / 3)])
def test_few_circles_fill_a_disc(count: int, optimum: float) -> None:
    problem = CirclePacking(count, region="circle")
    circles = packing_steps.search(0, 1.5, count=count, region="circle")
    verified = problem.verify(circles)
    assert verified.value == pytest.approx(optimum, abs=1e-9)
    np.testing.assert_array_equal(verified.construction, circles)  # without shrinking


def test_circles_outside_of_a_disc_are_moved_into_it() -> None:
    for circles in (np.full((6, 3), 9.0), np.zeros((6, 3)), np.full((6, 3), -0.75)):
        packing = CirclePacking(6, region="circle").verify(packing_steps.polish_circle(circles, 0.5))
        assert packing.value > 1.9


def test_all_zero_heights_cannot_be_improved() -> None:
    with pytest.raises(ValueError, match="no height is above 0"):
        autocorrelation_steps.polish_first(np.zeros(3), 1.0)
