from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlkit.envs.discovery import discovery
from rlkit.envs.discovery.problem import (
    InvalidConstruction,
    Problem,
    hash_construction,
    load_published,
    load_published_with_program,
)
from rlkit.envs.discovery.problems.autocorrelation import (
    FirstAutocorrelation,
    SecondAutocorrelation,
    ThirdAbsoluteAutocorrelation,
    ThirdAutocorrelation,
    convolve,
)
from rlkit.envs.discovery.problems.autocorrelation_steps import Objective, compute_value
from rlkit.envs.discovery.problems.erdos import Erdos, overlaps
from rlkit.envs.discovery.problems.exact import convolve as convolve_exactly
from rlkit.envs.discovery.problems.exact import format_decimals
from rlkit.envs.discovery.problems.packing import CirclePacking
from rlkit.envs.discovery.problems.subsets import Kissing, NoIsosceles
from rlkit.errors import UsageError

ALL: list[Problem] = [
    Erdos(),
    Erdos(n_points=600),
    FirstAutocorrelation(),
    SecondAutocorrelation(),
    ThirdAutocorrelation(),
    ThirdAbsoluteAutocorrelation(),
    CirclePacking(26),
    CirclePacking(5),
    CirclePacking(21, region="rectangle"),
    CirclePacking(5, region="circle"),
    Kissing(11),
    Kissing(2),
    NoIsosceles(),
]
ERDOS = ["erdos_haugland_2016", "erdos_alphaevolve_2025", "erdos_ttt_discover_2026"]
HEIGHTS = st.lists(st.floats(0, 1), min_size=2, max_size=30).filter(lambda heights: sum(heights) > 1e-3)


@pytest.mark.parametrize(
    ("name", "problem", "value"),
    [
        ("erdos_haugland_2016", Erdos(), 0.380926853433087),
        ("erdos_alphaevolve_2025", Erdos(), 0.380923035108450),
        ("erdos_ttt_discover_2026", Erdos(), 0.380875323217719),
        ("ac1_alphaevolve_2025", FirstAutocorrelation(), 1.5052939684),
        ("ac2_alphaevolve_2025", SecondAutocorrelation(), 0.8962799442),
        ("ac3_alphaevolve_2025", ThirdAutocorrelation(), 1.4556427954),
        ("ac3_alphaevolve_2025", ThirdAbsoluteAutocorrelation(), 4.3340465244),
        ("ac3_absolute_alphaevolve_2025", ThirdAbsoluteAutocorrelation(), 1.4687620697),
        ("circle_packing_26_alphaevolve_2025", CirclePacking(26), 2.6358627564),
        ("circle_packing_rectangle_21_alphaevolve_2025", CirclePacking(21, "rectangle"), 2.3658321334),
    ],
)
def test_a_published_construction_has_the_published_value(name: str, problem: Problem, value: float) -> None:
    digits = 15 if name.startswith("erdos") else 10
    assert problem.verify(load_published(name)).value == pytest.approx(value, abs=0.51 * 10**-digits)


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("erdos_haugland_2016", "0.3809268535"),
        ("erdos_alphaevolve_2025", "0.3809230352"),
        ("erdos_ttt_discover_2026", "0.3808753233"),
    ],
)
def test_a_certificate_is_the_exact_value_rounded_up(name: str, bound: str) -> None:
    verified = Erdos().verify(load_published(name))
    proven = Erdos().certificate(verified.construction)
    assert proven.bound == bound
    exact = Fraction(proven.exact)
    assert abs(float(exact) - verified.value) < 1e-15
    assert exact <= Fraction(bound) < exact + Fraction(1, 10**10)
    assert bound in proven.claim


def brute_force(h: list[Fraction], shift: Fraction) -> Fraction:
    """∫ h(x)(1 − h(x + shift)) dx over a common refinement, exactly."""
    width = Fraction(2, len(h))
    cuts = sorted({width * i for i in range(len(h) + 1)} | {width * i - shift for i in range(len(h) + 1)})
    total = Fraction(0)
    for left, right in pairwise(cuts):
        middle = (left + right) / 2
        if 0 < middle < 2 and 0 < middle + shift < 2:
            total += (right - left) * h[int(middle / width)] * (1 - h[int((middle + shift) / width)])
    return total


@settings(max_examples=25)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=6), st.fractions(-2, 2))
def test_no_real_shift_overlaps_more_than_the_exact_value(eighths: list[int], shift: Fraction) -> None:
    # a function and its complement, side by side, sum to half of their number
    h = [Fraction(e, 8) for e in eighths] + [1 - Fraction(e, 8) for e in eighths]
    exact = Erdos().compute_exactly(np.array([float(step_shift) for step_shift in h]))[0]
    assert brute_force(h, shift) <= exact
    steps = [Fraction(2 * m, len(h)) for m in range(-len(h), len(h) + 1)]
    assert max(brute_force(h, step_shift) for step_shift in steps) == exact


@settings(max_examples=50)
@given(HEIGHTS)
def test_a_verified_construction_is_rescaled_and_agrees_with_its_certificate(heights: list[float]) -> None:
    try:
        verified = Erdos().verify(np.array(heights))
    except InvalidConstruction as error:
        assert "[0, 1]" in str(error)  # rescaled, a height would be above 1
        return
    h = verified.construction
    assert 0 <= h.min() <= h.max() <= 1
    assert h.sum() == pytest.approx(len(h) / 2)
    assert float(Erdos().compute_exactly(h)[0]) == pytest.approx(verified.value, abs=1e-15)
    again = Erdos().verify(h)
    assert hash_construction(again.construction) == hash_construction(h)  # or the same would be archived twice
    assert again.value == verified.value


@settings(max_examples=100)
@given(st.sampled_from(ERDOS), st.floats(-4e-12, 4e-12), st.floats(0, 1e-12))
def test_rounding_tolerance_gives_no_better_value(name: str, more: float, past: float) -> None:
    h = Erdos().verify(load_published(name)).construction
    known_value = Erdos().verify(h).value
    stretched = np.where(h >= 1 - 1e-9, h + past, np.clip(h * (1 + more), 0, 1))
    try:
        verified = Erdos().verify(stretched)
    except InvalidConstruction as error:
        assert "after rescaling" in str(error)
        return
    assert not Erdos().is_better(verified.value, known_value)
    assert float(Erdos().compute_exactly(verified.construction)[0]) == pytest.approx(verified.value, abs=1e-15)


ODD = st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 1e-310, 1e-300, 1e-12, -1e-12, 0.5, 1.0, 1 + 1e-12, 1e300, 1.7e308])


@pytest.mark.parametrize(
    "problem",
    [
        Erdos(),
        FirstAutocorrelation(),
        SecondAutocorrelation(),
        ThirdAutocorrelation(),
        ThirdAbsoluteAutocorrelation(),
        CirclePacking(2),
        CirclePacking(2, "rectangle"),
        CirclePacking(2, "circle"),
        Kissing(3),
        NoIsosceles(4),
    ],
)
@pytest.mark.filterwarnings("error")
@settings(max_examples=300)
@given(numbers=st.lists(ODD | st.floats(), min_size=6, max_size=6))
def test_any_numbers_give_a_finite_value_or_none(problem: Problem, numbers: list[float]) -> None:
    shape = (2, 3) if isinstance(problem, CirclePacking | Kissing) else (3, 2)
    shape = shape if isinstance(problem, CirclePacking | Kissing | NoIsosceles) else (6,)
    try:
        verified = problem.verify(np.array(numbers).reshape(shape))
    except InvalidConstruction:
        return
    assert np.isfinite(verified.value)
    assert np.isfinite(verified.construction).all()
    assert np.isfinite(problem.reward(verified.value))
    again = problem.verify(verified.construction)
    assert again.value == pytest.approx(verified.value, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize(
    ("given_array", "why"),
    [
        (np.full((2, 2), 0.5), "2 dimensions"),
        (np.array(0.5), "0 dimensions"),
        (np.array([]), "0 values"),
        (np.full(1001, 0.5), "1001 values"),
        (np.array([0.5, np.nan]), "not finite"),
        (np.array([0.5, np.inf]), "not finite"),
        (np.array([0.5, -1e-9]), "-1e-09"),
        (np.array([1.1, 0.2]), "1.1"),
        (np.array([0.0, 0.0]), "sum to 0"),
        (np.array([0.9, 0.1, 0.1]), "after rescaling"),
        (np.array([5e-324, 0.0, 0.0, 5e-324]), "sum to 9.88e-324"),
        (np.array([1e-300] * 4), "cannot be rescaled"),
    ],
)
def test_a_step_function_that_breaks_a_rule_is_rejected(given_array: NDArray[np.float64], why: str) -> None:
    with pytest.raises(InvalidConstruction, match=why):
        Erdos().verify(given_array)


def test_a_height_above_one_by_rounding_is_moved_toward_a_half() -> None:
    h = np.array([1 + 1e-13, 0.0, 1.0, 0.0])
    verified = Erdos().verify(h)
    assert verified.construction.max() <= 1
    assert Erdos().compute_exactly(h)[0] > 0


def test_a_wrong_number_of_pieces_can_be_rejected() -> None:
    problem = Erdos(n_points=10, exact_n=True)
    problem.verify(np.full(10, 0.5))
    with pytest.raises(InvalidConstruction, match="12 pieces, and must have 10"):
        problem.verify(np.full(12, 0.5))


@pytest.mark.parametrize("count", [5, 599, 600, 601, 1000])
def test_fast_and_plain_overlaps_agree(count: int) -> None:
    h = np.random.default_rng(count).uniform(0, 1, count)
    plain = np.correlate(h, 1 - h, mode="full") * 2 / count
    np.testing.assert_allclose(overlaps(h), plain, atol=1e-13)
    np.testing.assert_allclose(convolve(h), np.convolve(h, h), rtol=1e-11)


def test_splitting_pieces_preserves_the_exact_value() -> None:
    h = Erdos().verify(load_published("erdos_haugland_2016")).construction
    assert Erdos().compute_exactly(np.repeat(h, 3))[0] == Erdos().compute_exactly(h)[0]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 1 << 70), min_size=1, max_size=12), st.data())
def test_exact_correlations_equal_their_sums(a: list[int], data: st.DataObject) -> None:
    b = data.draw(st.lists(st.integers(0, 1 << 70), min_size=len(a), max_size=len(a)))
    count = len(a)
    expected = [sum(a[i + m] * b[i] for i in range(count) if 0 <= i + m < count) for m in range(-(count - 1), count)]
    assert convolve_exactly(a, b[::-1]) == expected


@given(st.fractions(-10, 10), st.integers(1, 12))
def test_decimals_are_rounded_in_the_requested_direction(value: Fraction, places: int) -> None:
    low, high = (Fraction(format_decimals(value, places=places, up=up)) for up in (False, True))
    assert low <= value <= high <= low + Fraction(1, 10**places)


@pytest.mark.parametrize("problem", [FirstAutocorrelation(), SecondAutocorrelation()])
def test_an_autocorrelation_is_scale_invariant_and_rejects_negative_heights(problem: Problem) -> None:
    f = np.random.default_rng(0).uniform(0, 1, 50)
    value = problem.verify(f).value
    for scale in (1e-300, 3.7, 1e300):
        assert problem.verify(f * scale).value == pytest.approx(value, rel=1e-12)
    for wrong, why in ((f - 1, "at least 0"), (f * 0, "all heights are 0"), (f * np.nan, "not finite")):
        with pytest.raises(InvalidConstruction, match=why):
            problem.verify(wrong)


def test_the_first_autocorrelation_of_a_constant_is_two_and_the_second_two_thirds() -> None:
    assert FirstAutocorrelation().verify(np.ones(40)).value == pytest.approx(2)
    assert SecondAutocorrelation().verify(np.ones(40)).value == pytest.approx(2 / 3)


AUTOCORRELATIONS: list[tuple[Problem, Objective]] = [
    (FirstAutocorrelation(), "first"),
    (SecondAutocorrelation(), "second"),
    (ThirdAutocorrelation(), "third"),
    (ThirdAbsoluteAutocorrelation(), "third_absolute"),
]


@pytest.mark.parametrize(
    ("problem", "objective"), AUTOCORRELATIONS, ids=[problem.name for problem, _ in AUTOCORRELATIONS]
)
@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(st.floats(-1, 1) | st.sampled_from([5e-324, -0.0, 1e-300, 0.1]), min_size=2, max_size=40),
    scale=st.sampled_from([1.0, 1e308, 2.0**-1000]),
    times=st.sampled_from([1, 30]),
)
def test_the_value_of_an_autocorrelation_is_its_certificate_rounded(
    problem: Problem, objective: Objective, numbers: list[float], scale: float, times: int
) -> None:
    signed = objective.startswith("third")
    f = np.repeat(np.array(numbers) if signed else np.abs(numbers), times) * scale
    try:
        verified = problem.verify(f)
    except InvalidConstruction as error:
        assert f.any() == ("nearer to 0" in str(error))
        if f.any():
            f /= np.abs(f).max()
            assert abs(f.sum()) <= 1.01e-6 * np.abs(f).sum()
        return
    h = verified.construction
    proven = problem.certificate(h)
    assert proven is not None
    exact = Fraction(proven.exact)
    assert float(exact) == verified.value
    assert len(proven.exact) < 500
    margin = Fraction(proven.bound) - exact
    assert 0 <= (margin if problem.minimise else -margin) < Fraction(1, 10**10)
    assert np.abs(h).max() == 1
    assert h.sum() > 0
    if h.sum() > 0.05 * np.abs(h).sum():  # otherwise floats cancel
        assert compute_value(h, objective) == pytest.approx(verified.value, rel=1e-12)
    again = problem.verify(h)
    assert hash_construction(again.construction) == hash_construction(h)


def test_the_certificate_of_a_published_autocorrelation_agrees_with_plain_sums() -> None:
    problem = ThirdAutocorrelation()
    f = problem.verify(load_published("ac3_alphaevolve_2025")).construction
    heights = [Fraction(height) for height in f.tolist()]
    count = len(heights)
    corners = [
        sum(heights[i] * heights[m - i] for i in range(max(0, m - count + 1), min(count, m + 1)))
        for m in range(0, 2 * count - 1, 7)
    ]
    value = Fraction(problem.certificate(f).exact)
    assert max(corners) * 2 * count <= value * sum(heights) ** 2
    assert float(value) == pytest.approx(2 * count * np.convolve(f, f).max() / f.sum() ** 2, rel=1e-12)


@pytest.mark.parametrize("problem", [FirstAutocorrelation(), SecondAutocorrelation(), ThirdAutocorrelation()])
def test_the_certificate_of_an_autocorrelation_is_about_the_exact_heights(problem: Problem) -> None:
    exact = [Fraction((1 << 90) // 3, 1 << 90), Fraction(1), Fraction(1, 2)]
    f = problem.verify(np.array(exact, np.float64)).construction
    proven, rounded = problem.certificate(f, exact), problem.certificate(f)
    assert proven is not None
    assert rounded is not None
    a, b, c = exact
    corners = [a * a, 2 * a * b, b * b + 2 * a * c, 2 * b * c, c * c]
    value = 6 * max(corners) / sum(exact) ** 2
    if not problem.minimise:
        y = [Fraction(0), *corners, Fraction(0)]
        value = sum(p * p + p * q + q * q for p, q in pairwise(y)) / (3 * sum(corners) * max(corners))
    assert Fraction(proven.exact) == value != Fraction(rounded.exact)


def test_exact_heights_obey_the_rules_that_rounding_hides() -> None:
    exact = [Fraction(-1, 1 << 1200), Fraction(1)]
    f = FirstAutocorrelation().verify(np.array(exact, np.float64)).construction
    with pytest.raises(InvalidConstruction, match="a height is below 0"):
        FirstAutocorrelation().certificate(f, exact)


def test_exact_circles_obey_the_rules_of_a_rectangle() -> None:
    problem = CirclePacking(2, "rectangle")
    third = Fraction((1 << 80) // 3, 1 << 80)
    exact = [third, third, third, 3 * third, third, third]
    circles = problem.verify(np.array(exact, np.float64).reshape(2, 3)).construction
    proven = problem.certificate(circles, exact)
    assert (Fraction(proven.exact), proven.normalisation) == (2 * third, "")
    with pytest.raises(InvalidConstruction, match="leaves the rectangle"):
        problem.certificate(circles, [third, third - Fraction(1, 1 << 30), *exact[2:]])


def test_ten_thousand_heights_are_proven_within_seconds() -> None:
    f = np.random.default_rng(0).uniform(-0.1, 1, 10_000)
    verified = ThirdAutocorrelation().verify(f)
    assert compute_value(verified.construction, "third") == pytest.approx(verified.value, rel=1e-12)


def test_a_signed_function_needs_an_integral() -> None:
    for problem in (ThirdAutocorrelation(), ThirdAbsoluteAutocorrelation()):
        with pytest.raises(InvalidConstruction, match="the integral of f is nearer to 0 than 1e-6"):
            problem.verify(np.array([1.0, -1.0, 1e-7]))
        f = np.array([1.0, -1.0, 1e-5])
        assert problem.verify(f).value == problem.verify(-f).value


def test_the_absolute_value_stands_inside_or_outside_of_the_maximum() -> None:
    f = np.array([-1.0, 3.0, -1.0])  # f*f = 1, −6, 11, −6, 1
    assert ThirdAutocorrelation().verify(f).value == pytest.approx(66)
    g = np.array([3.0, -2.0])  # f*f = 9, −12, 4
    assert ThirdAutocorrelation().verify(g).value == pytest.approx(36)
    assert ThirdAbsoluteAutocorrelation().verify(g).value == pytest.approx(48)


@settings(max_examples=50)
@given(st.lists(st.tuples(*[st.integers(-(1 << 70), 1 << 70)] * 2), min_size=1, max_size=12))
def test_exact_convolutions_of_signed_numbers_equal_their_sums(pairs: list[tuple[int, int]]) -> None:
    a, b = map(list, zip(*pairs, strict=True))
    count = len(a)
    expected = [sum(a[i] * b[m - i] for i in range(count) if 0 <= m - i < count) for m in range(2 * count - 1)]
    assert convolve_exactly(a, b) == expected
    assert convolve_exactly(a, a) == convolve_exactly(a, a.copy())


def test_circles_fit_a_rectangle_of_perimeter_four_and_no_larger() -> None:
    problem = CirclePacking(2, region="rectangle")
    third = 2.0**-10 * 341  # just below a third
    circles = np.array([[third, third, third], [3 * third, third, third]])
    assert problem.verify(circles).value == 2 * third
    with pytest.raises(InvalidConstruction, match="leaves the rectangle"):
        problem.verify(circles + np.array([[0, 0, 0], [0.01, 0, 0]]))
    with pytest.raises(InvalidConstruction, match="leaves the rectangle"):
        problem.verify(circles - np.array([[2.0**-30, 0, 0], [0, 0, 0]]))
    with pytest.raises(InvalidConstruction, match="leaves the square"):
        CirclePacking(2).verify(circles)


TOUCHING = (0.375, 0.5, 0.375)  # the distance from the origin is 0.625, exactly


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_circle_may_touch_the_disc_but_not_leave_it_by_one_bit(place: int) -> None:
    problem = CirclePacking(1, "circle")
    assert problem.verify(np.array([TOUCHING])).value == 0.375
    circles = np.array([TOUCHING])
    circles[0, place] = np.nextafter(circles[0, place], 1)
    assert problem.verify(circles).value == circles[0, 2] - 1e-12
    circles[0, place] += 1e-11
    with pytest.raises(InvalidConstruction, match=r"the circle at \(0.375, 0.5\) leaves the disc"):
        problem.verify(circles)


def test_exact_circles_obey_the_rules_of_a_disc() -> None:
    problem = CirclePacking(1, "circle")
    circles, exact = np.array([TOUCHING]), [Fraction(number) for number in TOUCHING]
    assert problem.certificate(circles, exact).normalisation == ""
    longer = [*exact[:2], exact[2] + Fraction(1, 1 << 80)]  # equal in float64
    assert problem.certificate(circles, longer).normalisation == "radii reduced by 1e-12"


@pytest.mark.parametrize("circle", [(0.1, 0, 1.5), (0, 0, 1.1), (0.8, 0.8, 0), (-1.1, 0, 0), (0, 2.1, 0.1)])
def test_a_circle_outside_of_the_disc_is_rejected(circle: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidConstruction, match="leaves the disc"):
        CirclePacking(1, "circle").verify(np.array([circle]))


@settings(max_examples=60)
@given(st.tuples(*[st.integers(-16, 16)] * 2, st.integers(0, 16)))
def test_membership_of_the_disc_agrees_with_distances(sixteenths: tuple[int, int, int]) -> None:
    x, y, radius = (number / 16 for number in sixteenths)
    try:
        CirclePacking(1, "circle").verify(np.array([[x, y, radius]]))
    except InvalidConstruction:
        assert np.hypot(x, y) + radius > 1
        return
    assert np.hypot(x, y) + radius <= 1


@pytest.mark.parametrize("count", [500, 600, 1000])
def test_a_search_can_start_from_many_pieces(count: int) -> None:
    source = discovery(options={"n_points": count}, starts=1, reuse="none")
    assert f"a construction of {count} values" in str(source.next().prompt()[0]["content"])


def test_circles_may_touch_but_not_overlap_by_one_bit() -> None:
    problem = CirclePacking(2)
    touching = np.array([[0.25, 0.5, 0.25], [0.75, 0.5, 0.25]])
    assert problem.verify(touching).value == pytest.approx(0.5, abs=1e-11)
    rounded = touching + np.array([[0, 0, 1e-13], [0, 0, 0]])
    verified = problem.verify(rounded)
    assert verified.value < 0.5
    again = problem.verify(verified.construction)
    assert hash_construction(again.construction) == hash_construction(
        verified.construction
    )  # or the same would be archived twice
    nearer = touching - np.array([[0, 0, 0], [1e-11, 0, 0]])
    with pytest.raises(InvalidConstruction, match="circles 0 and 1 overlap"):
        problem.verify(nearer)
    outside = touching + np.array([[0, 0, 0], [1e-11, 0, 0]])
    with pytest.raises(InvalidConstruction, match="leaves the square"):
        problem.verify(outside)


@pytest.mark.parametrize(
    ("circles", "why"),
    [
        (np.zeros((3, 3)), r"\(3, 3\)"),
        (np.array([[0.5, 0.5, -0.1], [0.2, 0.2, 0.1]]), "at least 0"),
        (np.array([[0.5, 0.5, np.nan], [0.2, 0.2, 0.1]]), "not finite"),
        (np.array([[9.0, 0.5, 0.1], [0.2, 0.2, 0.1]]), "leaves the square"),
    ],
)
def test_a_packing_that_breaks_a_rule_is_rejected(circles: NDArray[np.float64], why: str) -> None:
    with pytest.raises(InvalidConstruction, match=why):
        CirclePacking(2).verify(circles)


def test_a_packings_certificate_is_rounded_down() -> None:
    verified = CirclePacking(26).verify(load_published("circle_packing_26_alphaevolve_2025"))
    proven = CirclePacking(26).certificate(verified.construction)
    assert Fraction(proven.bound) <= Fraction(proven.exact) < Fraction(proven.bound) + Fraction(1, 10**10)


@pytest.mark.parametrize("problem", ALL, ids=lambda problem: problem.name)
@settings(max_examples=15)
@given(seed=st.integers(0, 1000))
def test_a_random_start_is_valid_and_rewarded_above_failure(problem: Problem, seed: int) -> None:
    verified = problem.verify(problem.start(np.random.default_rng(seed)))
    assert problem.reward(verified.value) > 0
    again = problem.verify(problem.start(np.random.default_rng(seed)))
    assert hash_construction(again.construction) == hash_construction(verified.construction)


@settings(max_examples=200)
@given(st.integers(2, 12), st.integers(0, 10_000))
def test_a_random_start_of_few_pieces_is_valid(count: int, seed: int) -> None:
    for problem in (Erdos(n_points=count), FirstAutocorrelation(n_points=count), CirclePacking(count - 1)):
        problem.verify(problem.start(np.random.default_rng(seed)))


@pytest.mark.parametrize("problem", ALL, ids=lambda problem: problem.name)
def test_a_better_value_has_a_higher_reward(problem: Problem) -> None:
    worse, better = (0.9, 0.8) if problem.minimise else (0.8, 0.9)
    assert problem.is_better(better, worse)
    assert not problem.is_better(worse, worse)
    assert problem.reward(better) > problem.reward(worse)


def test_negative_zero_does_not_change_the_construction() -> None:
    assert (
        hash_construction(np.array([0.0, 1.0]))
        == hash_construction(np.array([-0.0, 1.0]))
        != hash_construction(np.array([1.0, 0.0]))
    )


@settings(max_examples=40)
@given(st.lists(st.integers(0, 1 << 40), min_size=2, max_size=40).filter(any), st.sampled_from([1, 20]))
def test_autocorrelations_agree_with_exact_arithmetic(heights: list[int], times: int) -> None:
    f = [height for height in heights for _ in range(times)]  # 600 pieces and more are folded in another way
    corners = convolve_exactly(f, f)
    y = [0, *corners, 0]
    square = Fraction(sum(a * a + a * b + b * b for a, b in pairwise(y)), 3)
    first = Fraction(2 * len(f) * max(corners), sum(f) ** 2)
    second = square / (sum(corners) * max(corners))
    given_array = np.array(f, np.float64)
    assert FirstAutocorrelation().verify(given_array).value == pytest.approx(float(first), rel=1e-12)
    assert SecondAutocorrelation().verify(given_array).value == pytest.approx(float(second), rel=1e-12)


@settings(max_examples=60)
@given(st.lists(st.tuples(*[st.integers(0, 16)] * 2, st.integers(0, 6)), min_size=2, max_size=5))
def test_packing_validity_agrees_with_exact_arithmetic(sixteenths: list[tuple[int, int, int]]) -> None:
    circles = [[Fraction(number, 16) for number in circle] for circle in sixteenths]
    fits = all(r <= x <= 1 - r and r <= y <= 1 - r for x, y, r in circles) and all(
        (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2 >= (a[2] + b[2]) ** 2 for a, b in combinations(circles, 2)
    )
    try:
        verified = CirclePacking(len(circles)).verify(np.array(circles, np.float64))
    except InvalidConstruction:
        assert not fits
        return
    assert fits
    assert verified.value == pytest.approx(float(sum(circle[2] for circle in circles)), abs=1e-10)


def test_a_missing_construction_is_named_with_similar_names() -> None:
    with pytest.raises(UsageError, match="Did you mean 'erdos_haugland_2016'"):
        load_published("erdos_hauglund_2016")


def test_a_file_may_contain_the_program_of_its_construction(tmp_path: Path) -> None:
    path = tmp_path / "waves.json"
    path.write_text('{"values": [0.25, 0.75], "program": "def run(): ..."}')
    construction, program = load_published_with_program(str(path))
    assert construction.tolist() == [0.25, 0.75]
    assert program == "def run(): ..."
    assert load_published_with_program("erdos_haugland_2016")[1] == ""
    source = discovery(start=str(path))
    assert "It was made by this program:\n\n```python\ndef run(): ..." in str(source.next().prompt()[0]["content"])
