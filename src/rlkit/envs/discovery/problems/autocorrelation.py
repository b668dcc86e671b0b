"""First and second autocorrelation inequality.

Both concern functions f ≥ 0 on an interval and their autoconvolution f*f. For a step function with n equal pieces, f*f
is piecewise linear, and the discrete convolution of the heights gives its corners, so its norms are finite sums. The
values do not depend on the scale of f. Sources: Matolcsi and Vinuesa 2010 (arXiv:0907.1379); problems B.1 and B.2 of
AlphaEvolve 2025.

Invariant: a value depends only on the heights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rlkit.envs.discovery.problem import (
    Construction,
    InvalidConstruction,
    PieceCount,
    Problem,
    VerifiedConstruction,
    check_vector,
)
from rlkit.envs.discovery.problems.autocorrelation_steps import convolve, first_value, second_value
from rlkit.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class _Autocorrelation(Problem):
    """Base class of both inequalities.

    Args:
        n_points: number of pieces of random initial step functions.
        max_points: maximum number of pieces of a construction.

    Raises:
        UsageError: `n_points` is above `max_points`.
    """

    n_points: PieceCount = 100
    max_points: PieceCount = 10_000

    question: ClassVar[str]
    """First paragraph of the statement."""
    formula: ClassVar[str]
    """Formula of the value, for the statement."""
    compute_value: ClassVar[Callable[[Construction], float]]
    """Function that computes the value of heights."""
    initial = "initial_f_values"
    shape = "a one-dimensional array of floats, the heights of the pieces from left to right"

    def __post_init__(self) -> None:
        if self.n_points > self.max_points:
            raise UsageError(f"options: n_points is {self.n_points}, above max_points {self.max_points}")

    def statement(self) -> str:
        return (
            f"{self.question}\n\nA construction is the heights of n pieces of equal width, with any n from 2 to "
            f"{self.max_points}. Each height is a finite number, none is below 0, and not all are 0. The scale of f "
            f"makes no difference. With c = np.convolve(f, f), the verifier computes\n\n{self.formula}"
        )

    def start(self, rng: np.random.Generator) -> Construction:
        """Return independent heights between 0.5 and 1.5."""
        return rng.uniform(0.5, 1.5, self.n_points)

    def draw(self, figure: Figure, construction: Construction) -> None:
        """Draw the step function, and below it its autoconvolution."""
        steps, curve = figure.subplots(2, 1)
        edges = np.linspace(-0.25, 0.25, len(construction) + 1)
        steps.stairs(construction, edges, fill=True, alpha=0.35, color="C0")
        steps.set(xlabel="x", ylabel="f(x)", xlim=(-0.25, 0.25))
        autoconvolution = convolve(construction)
        curve.plot(
            np.linspace(-0.5, 0.5, len(autoconvolution) + 2),
            np.pad(autoconvolution, 1) / autoconvolution.max(),
            color="C1",
        )
        curve.set(xlabel="x", ylabel="(f*f)(x) / max", xlim=(-0.5, 0.5), ylim=(0, 1.1))

    def verify(self, construction: Construction) -> VerifiedConstruction:
        """Return the heights, scaled to a maximum of 1, and their value."""
        f = check_vector(construction, min_length=2, max_length=self.max_points)
        if f.min() < 0:
            raise InvalidConstruction(f"a height is {f.min():.9g}; heights must be at least 0")
        if f.max() <= 0:
            raise InvalidConstruction("all heights are 0")
        f /= f.max()
        return VerifiedConstruction(f, self.compute_value(f))


@dataclass(frozen=True)
class FirstAutocorrelation(_Autocorrelation):
    """max f*f ≥ C₁ (∫f)² for all f ≥ 0 on [−¼, ¼]: a small ratio bounds C₁ from above."""

    name = "autocorrelation_1"
    minimise = True
    symbol = "C1"
    scripted = ((1, 1.5260), (10, 1.5214), (30, 1.5117), (60, 1.5096))
    polish = "rlkit.envs.discovery.problems.autocorrelation_steps:polish_first"
    compute_value = staticmethod(first_value)

    question = (
        "The first autocorrelation inequality asks for a step function f >= 0 on [-1/4, 1/4] for which the maximum of "
        "its autoconvolution f*f, divided by the square of its integral, is as small as possible."
    )
    formula = "    C1 = 2 * n * np.max(c) / np.sum(f) ** 2"


@dataclass(frozen=True)
class SecondAutocorrelation(_Autocorrelation):
    """‖f*f‖₂² ≤ C₂ ‖f*f‖₁ ‖f*f‖_∞ for all f ≥ 0: a large ratio bounds C₂ from below."""

    name = "autocorrelation_2"
    minimise = False
    symbol = "C2"
    scripted = ((1, 0.8922), (10, 0.9021), (30, 0.9083), (60, 0.9097))
    polish = "rlkit.envs.discovery.problems.autocorrelation_steps:polish_second"
    compute_value = staticmethod(second_value)

    question = (
        "The second autocorrelation inequality asks for a step function f >= 0 for which the ratio of norms of its "
        "autoconvolution, ||f*f||_2^2 / (||f*f||_1 * ||f*f||_inf), is as large as possible; it is below 1."
    )
    formula = (
        "    y = np.pad(c, 1)\n"
        "    C2 = np.sum(y[:-1] ** 2 + y[:-1] * y[1:] + y[1:] ** 2) / 3 / (np.sum(c) * np.max(c))\n\n"
        "which is exact, since f*f is linear between its corners."
    )
