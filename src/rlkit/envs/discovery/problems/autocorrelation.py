"""The first and the second autocorrelation inequality.

Both are about functions f ≥ 0 on an interval and their autoconvolution f*f. Of a step function with n equal pieces that
is piecewise linear, with corners at the discrete convolution of the heights, so that its norms are finite sums. Neither
value depends on the scale of f. Sources: Matolcsi and Vinuesa 2010 (arXiv:0907.1379); problems B.1 and B.2 of
AlphaEvolve 2025.

Invariant: what is verified is what the formulas say of the heights alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlkit.envs.discovery.problem import Construction, Invalid, Pieces, Problem, Verified, one_dimensional
from rlkit.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FFT_FROM = 600
_RULES = (
    "A construction is the heights of n pieces of equal width, with any n from 2 to {most}. Each height is a finite "
    "number, none is below 0, and not all are 0. The scale of f makes no difference. With c = np.convolve(f, f), the "
    "verifier computes\n\n{formula}"
)


@dataclass(frozen=True)
class _Autocorrelation(Problem):
    """What both have in common.

    Args:
        n_points: pieces of the random step functions that a search starts from.
        max_points: pieces that a construction may have.

    Raises:
        UsageError: there are more of the former.
    """

    n_points: Pieces = 100
    max_points: Pieces = 10_000

    initial = "initial_f_values"
    shape = "a one-dimensional array of floats, the heights of the pieces from left to right"

    def __post_init__(self) -> None:
        if self.n_points > self.max_points:
            raise UsageError(f"options: n_points is {self.n_points}, above max_points {self.max_points}")

    def start(self, rng: np.random.Generator) -> Construction:
        """Independent heights between 0.5 and 1.5."""
        return rng.uniform(0.5, 1.5, self.n_points)

    def draw(self, figure: Figure, construction: Construction) -> None:
        """The step function, and below it its autoconvolution."""
        steps, curve = figure.subplots(2, 1)
        edges = np.linspace(-0.25, 0.25, len(construction) + 1)
        steps.stairs(construction, edges, fill=True, alpha=0.35, color="C0")
        steps.set(xlabel="x", ylabel="f(x)", xlim=(-0.25, 0.25))
        folded = convolved(construction)
        curve.plot(np.linspace(-0.5, 0.5, len(folded) + 2), np.pad(folded, 1) / folded.max(), color="C1")
        curve.set(xlabel="x", ylabel="(f*f)(x) / max", xlim=(-0.5, 0.5), ylim=(0, 1.1))

    def _heights(self, given: Construction) -> Construction:
        f = one_dimensional(given, least=2, most=self.max_points)
        if f.min() < 0:
            raise Invalid(f"a height is {f.min():.9g}; none may be below 0")
        if f.max() <= 0:
            raise Invalid("all heights are 0")
        return f / f.max()


@dataclass(frozen=True)
class FirstAutocorrelation(_Autocorrelation):
    """max f*f ≥ C₁ (∫f)² for all f ≥ 0 on [−¼, ¼]: a small ratio bounds C₁ from above."""

    name = "autocorrelation_1"
    minimise = True
    symbol = "C1"
    baseline = 1.50973
    best_known = 1.502744  # MILO, 2026: 1.50274360, rounded up
    scripted = ((1, 1.5260), (10, 1.5214), (30, 1.5117), (60, 1.5096))
    polish = "rlkit.envs.discovery.problems.autocorrelation_steps:polish_first"

    def statement(self) -> str:  # noqa: D102  inherited
        formula = "    C1 = 2 * n * np.max(c) / np.sum(f) ** 2"
        return (
            "The first autocorrelation inequality asks for a step function f >= 0 on [-1/4, 1/4] for which the "
            "maximum of its autoconvolution f*f, divided by the square of its integral, is as small as possible.\n\n"
            + _RULES.format(most=self.max_points, formula=formula)
        )

    def verified(self, given: Construction) -> Verified:  # noqa: D102  inherited
        f = self._heights(given)
        return Verified(f, float(2 * len(f) * convolved(f).max() / f.sum() ** 2))


@dataclass(frozen=True)
class SecondAutocorrelation(_Autocorrelation):
    """‖f*f‖₂² ≤ C₂ ‖f*f‖₁ ‖f*f‖_∞ for all f ≥ 0: a large ratio bounds C₂ from below."""

    name = "autocorrelation_2"
    minimise = False
    symbol = "C2"
    baseline = 0.9015
    best_known = 0.96359  # EinsteinArena, 2026-08-25
    scripted = ((1, 0.8922), (10, 0.9021), (30, 0.9083), (60, 0.9097))
    polish = "rlkit.envs.discovery.problems.autocorrelation_steps:polish_second"

    def statement(self) -> str:  # noqa: D102  inherited
        formula = (
            "    y = np.pad(c, 1)\n"
            "    C2 = np.sum(y[:-1] ** 2 + y[:-1] * y[1:] + y[1:] ** 2) / 3 / (np.sum(c) * np.max(c))\n\n"
            "which is exact, since f*f is linear between its corners."
        )
        return (
            "The second autocorrelation inequality asks for a step function f >= 0 for which the ratio of norms of its "
            "autoconvolution, ||f*f||_2^2 / (||f*f||_1 * ||f*f||_inf), is as large as possible; it is below 1.\n\n"
            + _RULES.format(most=self.max_points, formula=formula)
        )

    def verified(self, given: Construction) -> Verified:  # noqa: D102  inherited
        f = self._heights(given)
        corners = convolved(f)
        y = np.pad(corners, 1)
        square = float((y[:-1] ** 2 + y[:-1] * y[1:] + y[1:] ** 2).sum()) / 3
        return Verified(f, square / float(corners.sum() * corners.max()))


def convolved(f: Construction) -> Construction:
    """[2n − 1] the convolution of [n] heights ≥ 0 with themselves."""
    count = len(f)
    if count < _FFT_FROM:
        return np.convolve(f, f)
    size = 1 << (2 * count - 2).bit_length()
    spectrum = np.fft.rfft(f, size)
    return np.maximum(np.fft.irfft(spectrum * spectrum, size)[: 2 * count - 1], 0)
