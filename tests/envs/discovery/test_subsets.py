from __future__ import annotations

from fractions import Fraction
from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlkit.envs.discovery.problem import InvalidConstruction, Problem, hash_construction, load_published
from rlkit.envs.discovery.problems.subset_steps import (
    list_shell,
    polish_isosceles,
    polish_kissing,
    search_isosceles,
    search_kissing,
)
from rlkit.envs.discovery.problems.subsets import Kissing, NoIsosceles
from tests.marks import split_slow


def root_system(dimension: int) -> NDArray[np.float64]:
    """D_n: all ±e_i ±e_j."""
    vectors = np.zeros((0, dimension))
    for i, j in combinations(range(dimension), 2):
        for signs in product((-1, 1), repeat=2):
            vector = np.zeros((1, dimension))
            vector[0, [i, j]] = signs
            vectors = np.vstack([vectors, vector])
    return vectors


HEXAGON = np.array(sorted(permutations([1.0, -1.0, 0.0])))


@pytest.mark.parametrize(
    ("dimension", "vectors", "count"), [(2, HEXAGON, 6), (3, root_system(3), 12), (4, root_system(4), 24)]
)
@pytest.mark.parametrize("scale", [1.0, 0.75, 5e-324, 2.0**-1050, 1e308])
def test_root_systems_prove_the_kissing_numbers_at_any_scale(
    dimension: int, vectors: NDArray[np.float64], count: int, scale: float
) -> None:
    problem = Kissing(dimension)
    verified = problem.verify(vectors * scale)
    assert verified.value == count == problem.best_known
    shuffled = np.random.default_rng(0).permutation(vectors * scale)
    assert hash_construction(problem.verify(shuffled).construction) == hash_construction(verified.construction)
    assert problem.certificate(verified.construction).exact == f"{count}/1"


def test_the_published_vectors_of_dimension_eleven_are_593() -> None:
    problem = Kissing(11)
    published = load_published("kissing_11_alphaevolve_2025")
    assert problem.verify(published).value == 593
    longest = int((published**2).sum(axis=1).argmax())
    published[longest, 0] += np.sign(published[longest, 0]) * 1e6  # longer by 2e-7
    with pytest.raises(InvalidConstruction, match="the longest length apart"):
        problem.verify(published)


def test_integers_decide_where_floats_cannot() -> None:
    # squared lengths and distances of about 2^104, where floats are 2^52 apart
    longest = [2.0**52, 2.0**52, 0]
    Kissing(3).verify(np.array([longest, [2.0**52, 0, 2.0**52]]))
    with pytest.raises(InvalidConstruction, match="1 times the longest length apart, and must be 1"):
        Kissing(3).verify(np.array([longest, [2.0**52, 1, 2.0**52]]))


@pytest.mark.parametrize(
    ("vectors", "why"),
    [
        (np.zeros((2, 3)), "a vector is 0"),
        (np.array([[1.0, 0, 0], [1e-300, 0, 0]]), "too short"),
        (np.array([[1.0, 0, 0], [1.0, 0, 0]]), "0 times the longest"),
        (np.array([[1.0, 0, 0], [0.9, 0.5, 0]]), "apart, and must be 1"),
        (np.array([[np.inf, 0, 0]]), "not finite"),
        (np.ones((2, 5)), r"\(2, 5\)"),
        (np.ones(3), r"\(3,\)"),
        (np.ones((0, 3)), r"\(0, 3\)"),
        (np.ones((1_000_000, 3)), r"\(1000000, 3\)"),
        (np.array([[1.0, 0, 0, 0]]), "add up to 0"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_vectors_that_break_a_rule_are_rejected_in_one_line(vectors: NDArray[np.float64], why: str) -> None:
    with pytest.raises(InvalidConstruction, match=why) as refusal:
        Kissing(3).verify(vectors)
    assert "\n" not in str(refusal.value)


def is_isosceles(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    ab, bc, ca = ((p[0] - q[0]) ** 2 + (p[1] - q[1]) ** 2 for p, q in ((a, b), (b, c), (c, a)))  # flat triangles count
    return ab == bc or bc == ca or ca == ab


@pytest.mark.parametrize(("size", "count"), [(2, 2), (3, 4), (4, 6)])
def test_brute_force_finds_the_published_number_of_cells(size: int, count: int) -> None:
    cells = list(product(range(size), range(size)))
    bad = {frozenset(triple) for triple in combinations(cells, 3) if is_isosceles(*triple)}

    def extend(chosen: tuple[tuple[int, int], ...], rest: list[tuple[int, int]]) -> int:
        sizes = [len(chosen)]
        for place, cell in enumerate(rest):
            if not any(frozenset((cell, *pair)) in bad for pair in combinations(chosen, 2)):
                sizes.append(extend((*chosen, cell), rest[place + 1 :]))
        return max(sizes)

    assert extend((), cells) == count


@settings(max_examples=200)
@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6), st.randoms())
def test_validity_agrees_with_all_triples(cells: set[tuple[int, int]], random: object) -> None:
    has_triangle = any(is_isosceles(*triple) for triple in combinations(sorted(cells), 3))
    try:
        verified = NoIsosceles(6).verify(np.array(list(cells), np.float64))
    except InvalidConstruction as error:
        assert "equally far" in str(error)
        assert has_triangle
        return
    assert not has_triangle
    assert verified.value == len(cells)
    assert verified.construction.tolist() == [list(cell) for cell in sorted(cells)]


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        (np.array([[0.5, 1]]), "whole numbers from 0 to 3"),
        (np.array([[4.0, 1]]), "whole numbers"),
        (np.array([[-1.0, 1]]), "whole numbers"),
        (np.array([[np.nan, 1]]), "whole numbers"),
        (np.array([[1e308, 5e-324]]), "whole numbers"),
        (np.array([[0.0, 1], [-0.0, 1]]), "two cells are the same"),
        (np.array([[0.0, 0], [1, 1], [2, 2]]), r"the cell \[1, 1\] is equally far from \[0, 0\] and \[2, 2\]"),
        (np.zeros((17, 2)), r"\(17, 2\)"),
        (np.zeros((0, 2)), r"\(0, 2\)"),
        (np.zeros((2, 3)), r"\(2, 3\)"),
        (np.zeros(4), r"\(4,\)"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_cells_that_break_a_rule_are_rejected_in_one_line(cells: NDArray[np.float64], why: str) -> None:
    with pytest.raises(InvalidConstruction, match=why) as refusal:
        NoIsosceles(4).verify(cells)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("size", "count"), split_slow([(4, 6), (6, 9), (8, 13), (9, 16)], lambda case: case[0] == 6))
def test_the_search_finds_the_published_number_of_cells(size: int, count: int) -> None:
    counts = list[float]()
    problem = NoIsosceles(size)
    cells = search_isosceles(
        0, 2.0, size=size, on_best=lambda seconds, cells: counts.append(problem.verify(cells).value)
    )
    assert counts == sorted(counts)
    assert problem.verify(cells).value == counts[-1] == count


@pytest.mark.parametrize(("dimension", "count"), [(2, 6), (3, 12), (4, 24), (5, 40), (8, 240)])
def test_the_search_finds_the_published_number_of_vectors(dimension: int, count: int) -> None:
    assert Kissing(dimension).verify(search_kissing(0, 0.5, dimension=dimension)).value == count


@pytest.mark.parametrize("dimension", [2, 3, 5, 6, 8])
def test_the_vectors_of_a_shell_have_one_length_and_fit_their_space(dimension: int) -> None:
    shell = list_shell(dimension)
    assert len({float(vector @ vector) for vector in shell}) == 1
    assert len(np.unique(shell, axis=0)) == len(shell)
    assert Kissing(dimension).verify(shell[:1]).value == 1


@pytest.mark.parametrize("problem", [Kissing(8), Kissing(2), NoIsosceles(12)], ids=["8", "2", "grid"])
def test_polish_enlarges_a_start(problem: Problem) -> None:
    start = problem.start(np.random.default_rng(1))
    polish = polish_kissing if isinstance(problem, Kissing) else polish_isosceles
    before, after = problem.verify(start).value, problem.verify(polish(start, 0.5)).value
    assert after > before


def test_polish_returns_vectors_that_are_no_lattice_vectors() -> None:
    published = load_published("kissing_11_alphaevolve_2025")
    np.testing.assert_array_equal(polish_kissing(published, 0.1), published)


def to_fractions(array: NDArray[np.float64], exponent: int) -> list[Fraction]:
    return [Fraction(number) / (1 << exponent) for number in array.ravel().tolist()]


def test_a_proof_is_about_the_vectors_before_their_rounding() -> None:
    problem = Kissing(3)
    verified = problem.verify(root_system(3))
    exact = to_fractions(root_system(3), 70)
    assert problem.certificate(verified.construction, exact).bound == "12"
    longer = [*exact[:-1], exact[-1] * (1 + Fraction(1, 1 << 80))]
    assert problem.verify(np.array(longer, np.float64).reshape(12, 3)).value == 12
    with pytest.raises(InvalidConstruction, match="the longest length apart, and must be 1"):
        problem.certificate(verified.construction, longer)
    tilted = to_fractions(HEXAGON, 0)
    tilted[0] += Fraction(1, 1 << 80)
    with pytest.raises(InvalidConstruction, match="add up to 0"):
        Kissing(2).certificate(HEXAGON, tilted)


def test_a_proof_is_about_the_cells_before_their_rounding() -> None:
    problem = NoIsosceles(4)
    cells = problem.verify(np.array([[0.0, 0], [1, 2]])).construction
    exact = to_fractions(cells, 0)
    assert problem.certificate(cells, exact).bound == "2"
    with pytest.raises(InvalidConstruction, match="not two whole numbers"):
        problem.certificate(cells, [*exact[:-1], 2 + Fraction(1, 1 << 80)])
