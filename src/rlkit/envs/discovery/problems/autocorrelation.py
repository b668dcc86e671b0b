"""First, second and third autocorrelation inequality.

They concern functions f on an interval and their autoconvolution f*f; f ≥ 0 in the first and the second. For a step
function with n equal pieces, f*f is piecewise linear, and the discrete convolution of the heights gives its corners, so
its norms are finite sums. The values do not depend on the scale of f. Sources: Matolcsi and Vinuesa 2010
(arXiv:0907.1379); problems B.1 to B.3 of AlphaEvolve 2025.

Invariant: the value of a verified construction is the value that its certificate proves, rounded to float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rlkit.envs.discovery.problem import Construction, InvalidConstruction, VerifiedConstruction, check_vector
from rlkit.envs.discovery.problems.autocorrelation_steps import convolve
from rlkit.envs.discovery.problems.exact import convolve as convolve_exactly
from rlkit.envs.discovery.problems.exact import to_integers
from rlkit.envs.discovery.problems.step_functions import GRID, PieceCount, StepFunctionProblem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIN_SUM_SHARE = 10**6  # maximum Σ|f| / |Σf|; a sum nearer to 0 is more a result of rounding than of f
_THIRD = (
    "The third autocorrelation inequality asks for a step function f on [-1/4, 1/4], which may be negative, for which "
    "the maximum of {} over all shifts, divided by the square of its integral, is as small as possible."
)


@dataclass(frozen=True)
class _Autocorrelation(StepFunctionProblem):
    """Base class of the inequalities."""

    n_points: PieceCount = 100

    minimise = True
    question: ClassVar[str]  # first paragraph of the statement
    formula: ClassVar[str] = "    {symbol} = 2 * n * {peak} / np.sum(f) ** 2"  # formula of the value, for the statement
    signed: ClassVar[bool] = False  # true if heights may be negative
    absolute: ClassVar[bool] = False  # true for the maximum of |f*f|
    initial = "initial_f_values"

    def evaluate(self, heights: Sequence[int]) -> Fraction:
        """Return the value of heights, scaled to integers, in exact arithmetic."""
        corners = convolve_exactly(heights, heights)
        peak = max(map(abs, corners)) if self.absolute else max(corners)
        return Fraction(2 * len(heights) * peak, sum(heights) ** 2)

    def statement(self) -> str:
        rule = "with a sum that is not nearly 0" if self.signed else "none is below 0, and not all are 0"
        formula = self.formula.format(symbol=self.symbol, peak="np.max(np.abs(c))" if self.absolute else "np.max(c)")
        return (
            f"{self.question}\n\nA construction is the heights of n pieces of equal width, with any n from 2 to "
            f"{self.max_points}. Each height is a finite number, {rule}. The scale of f makes "
            f"no difference. With c = np.convolve(f, f), the verifier computes\n\n{formula}"
        )

    def start(self, rng: np.random.Generator) -> Construction:
        """Return independent heights between 0.5 and 1.5."""
        return rng.uniform(0.5, 1.5, self.n_points)

    def compute_exactly(self, heights: Construction | Sequence[Fraction]) -> tuple[Fraction, str]:
        integers, _ = to_integers(heights)
        if not self.signed and min(integers) < 0:
            raise InvalidConstruction("a height is below 0")
        if abs(sum(integers)) * _MIN_SUM_SHARE < sum(map(abs, integers)):
            raise InvalidConstruction("the integral of f is nearer to 0 than 1e-6 times the integral of |f|")
        return self.evaluate(integers), ""

    def draw(self, figure: Figure, construction: Construction) -> None:
        """Draw the step function, and below it its autoconvolution."""
        steps, curve = figure.subplots(2, 1)
        edges = np.linspace(-0.25, 0.25, len(construction) + 1)
        steps.stairs(construction, edges, fill=True, alpha=0.35, color="C0")
        steps.set(xlabel="x", ylabel="f(x)", xlim=(-0.25, 0.25))
        autoconvolution = np.pad(convolve(construction), 1)
        autoconvolution /= np.abs(autoconvolution).max()
        curve.plot(np.linspace(-0.5, 0.5, len(autoconvolution)), autoconvolution, color="C1")
        curve.set(xlabel="x", ylabel="(f*f)(x) / max", xlim=(-0.5, 0.5), ylim=(1.1 * autoconvolution.min(), 1.1))

    def verify(self, construction: Construction) -> VerifiedConstruction:
        """Return the heights, scaled to a maximum of 1 and to a positive integral, and their value."""
        f = check_vector(construction, min_length=2, max_length=self.max_points)
        if f.min() < 0 and not self.signed:
            raise InvalidConstruction(f"a height is {f.min():.9g}; heights must be at least 0")
        top = float(np.abs(f).max())
        if top == 0:
            raise InvalidConstruction("all heights are 0")
        f = np.round(f / top * GRID) / GRID
        value, _ = self.compute_exactly(f)  # which refuses a sum so near to 0 that floats could have its sign wrong
        return VerifiedConstruction(f if f.sum() > 0 else 0 - f, float(value))


@dataclass(frozen=True)
class FirstAutocorrelation(_Autocorrelation):
    """max f*f ≥ C₁ (∫f)² for all f ≥ 0 on [−¼, ¼]: a small ratio bounds C₁ from above."""

    name = "autocorrelation_1"
    symbol = "C1"
    scripted = ((1, 1.5257), (10, 1.5214), (30, 1.5114), (60, 1.5092))
    polish = "rlkit.envs.discovery.problems.autocorrelation_steps:polish_first"

    question = (
        "The first autocorrelation inequality asks for a step function f >= 0 on [-1/4, 1/4] for which the maximum of "
        "its autoconvolution f*f, divided by the square of its integral, is as small as possible."
    )


@dataclass(frozen=True)
class SecondAutocorrelation(_Autocorrelation):
    """‖f*f‖₂² ≤ C₂ ‖f*f‖₁ ‖f*f‖_∞ for all f ≥ 0: a large ratio bounds C₂ from below."""

    name = "autocorrelation_2"
    minimise = False
    symbol = "C2"
    scripted = ((1, 0.8922), (10, 0.9022), (30, 0.9099), (60, 0.9111))
    polish = "rlkit.envs.discovery.problems.autocorrelation_steps:polish_second"

    question = (
        "The second autocorrelation inequality asks for a step function f >= 0 for which the ratio of norms of its "
        "autoconvolution, ||f*f||_2^2 / (||f*f||_1 * ||f*f||_inf), is as large as possible; it is below 1."
    )
    formula = (
        "    y = np.pad(c, 1)\n"
        "    C2 = np.sum(y[:-1] ** 2 + y[:-1] * y[1:] + y[1:] ** 2) / 3 / (np.sum(c) * np.max(c))\n\n"
        "which is exact, since f*f is linear between its corners."
    )

    def evaluate(self, heights: Sequence[int]) -> Fraction:  # noqa: D102  inherited
        corners = convolve_exactly(heights, heights)
        square = sum(a * a + a * b + b * b for a, b in pairwise([0, *corners, 0]))
        return Fraction(square, 3 * sum(corners) * max(corners))


@dataclass(frozen=True)
class ThirdAutocorrelation(_Autocorrelation):
    """|max f*f| ≥ C₃ (∫f)² for all signed f on [−¼, ¼]: the definition of AlphaEvolve (B.3), EinsteinArena and MILO.

    The absolute value outside of the maximum has no effect: ∫ f*f = (∫f)², so the maximum is above 0.
    """

    name = "autocorrelation_3"
    symbol = "C3"
    signed = True
    scripted = ((5, 1.4751), (11, 1.4688), (20, 1.4671))
    polish = "rlkit.envs.discovery.problems.autocorrelation_steps:polish_third"

    question = _THIRD.format("its autoconvolution f*f, however negative f*f is elsewhere,")


@dataclass(frozen=True)
class ThirdAbsoluteAutocorrelation(ThirdAutocorrelation):
    """max |f*f| ≥ C₃′ (∫f)² for all signed f on [−¼, ¼]: the definition of Matolcsi and Vinuesa (AlphaEvolve, B.3′)."""

    name = "autocorrelation_3_absolute"
    symbol = "C3'"
    absolute = True
    scripted = ((5, 1.4771), (11, 1.4670), (20, 1.4657))
    polish = "rlkit.envs.discovery.problems.autocorrelation_steps:polish_third_absolute"

    question = _THIRD.format("|f*f|, the absolute value of its autoconvolution,")
