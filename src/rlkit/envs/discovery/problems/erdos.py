"""Erdős' minimum overlap problem.

C₅ is the infimum, over step functions h: [0, 2] → [0, 1] with ∫h = 1, of max_k ∫ h(x)(1 − h(x + k)) dx, integrated over
all x with x and x + k in [0, 2] (Swinnerton-Dyer; Haugland 2016, arXiv:1609.08000). With n equal pieces the overlap is
linear in k between multiples of 2/n, so its maximum over these multiples is its maximum over all k.

Invariant: the value of a verified construction is the value that its certificate proves, rounded to float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from rlkit.envs.discovery.problem import Construction, InvalidConstruction, VerifiedConstruction, check_vector
from rlkit.envs.discovery.problems.autocorrelation_steps import convolve
from rlkit.envs.discovery.problems.exact import convolve as convolve_exactly
from rlkit.envs.discovery.problems.exact import to_integers
from rlkit.envs.discovery.problems.step_functions import GRID, PieceCount, StepFunctionProblem
from rlkit.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROUNDING = 1e-15  # maximum |sum − n/2| / n that rounding may cause; a larger deviation could improve the value
_MIN_SUM = 1e-9  # minimum sum of heights; rescaling a smaller sum loses all precision, or overflows


@dataclass(frozen=True)
class Erdos(StepFunctionProblem):
    """Minimum overlap problem over step functions.

    Args:
        n_points: number of pieces of random initial step functions; None draws 40 to 99.
        max_points: maximum number of pieces of a construction.
        exact_n: require exactly `n_points` pieces.
        slack: maximum distance from [0, 1] that rounding may cause; all heights are then moved towards ½.

    Raises:
        UsageError: the options contradict each other.
    """

    max_points: PieceCount = 1000
    exact_n: bool = False
    slack: Annotated[float, Field(ge=0, le=0.1)] = 1e-12  # what float64 arithmetic may cause

    name = "erdos"
    minimise = True
    symbol = "C5"
    initial = "initial_h_values"
    scripted = ((2, 0.38105), (10, 0.380969), (60, 0.380922), (120, 0.380917), (300, 0.380877))
    polish = "rlkit.envs.discovery.problems.erdos_steps:polish"

    def __post_init__(self) -> None:
        if self.exact_n and self.n_points is None:
            raise UsageError("options: exact_n needs n_points; set it to the number of pieces")
        super().__post_init__()

    def statement(self) -> str:  # noqa: D102  inherited
        pieces = (
            f"exactly {self.n_points} pieces" if self.exact_n else f"any number of pieces from 2 to {self.max_points}"
        )
        return (
            "Erdős' minimum overlap problem asks for a step function h on [0, 2] with values in [0, 1] and integral 1 "
            "whose greatest overlap with its own complement is as small as possible. The overlap at shift k is the "
            "integral of h(x) * (1 - h(x + k)) over all x for which both x and x + k lie in [0, 2], and C5 is its "
            "maximum over all real k.\n\n"
            f"A construction is the heights of n pieces of equal width 2 / n, with {pieces}. Each height is a finite "
            "number from 0 to 1. The verifier rescales them so that they sum to n / 2, and refuses the construction if "
            "one of them is below 0 or above 1 then. It computes\n\n"
            '    C5 = np.max(np.correlate(h, 1 - h, mode="full")) * 2 / n\n\n'
            "which is exact: between multiples of 2 / n the overlap is linear in k."
        )

    def verify(self, construction: Construction) -> VerifiedConstruction:
        """Return C₅ and the heights, rescaled to integral 1 and moved into [0, 1]."""
        h = check_vector(construction, min_length=2, max_length=self.max_points)
        if self.exact_n and len(h) != self.n_points:
            raise InvalidConstruction(f"the construction has {len(h)} pieces, and must have {self.n_points}")
        self._check_bounds(h, "")
        total = float(h.sum())
        if total < _MIN_SUM:
            raise InvalidConstruction(f"the heights sum to {total:.3g}, and cannot be rescaled to sum to n / 2")
        if abs(total - len(h) / 2) > _ROUNDING * len(h):  # leave a verified construction unchanged, bit for bit
            h *= len(h) / 2 / total
        self._check_bounds(h, " after rescaling to the sum n / 2")
        excess = max(float(h.max()) - 1, -float(h.min()), 0.0)
        weight = excess / (0.5 + excess)  # the least that moves all heights into [0, 1], towards ½
        h = np.round(np.clip((1 - weight) * h + weight / 2, 0, 1) * GRID) / GRID
        return VerifiedConstruction(h, float(overlaps(h).max()))

    def start(self, rng: np.random.Generator) -> Construction:
        """Return ½ plus centred uniform noise of ±0.4, scaled to fit [0, 1], as TTT-Discover does."""
        count = self.n_points or int(rng.integers(40, 100))
        noise = rng.uniform(-0.4, 0.4, count)
        noise -= noise.mean()
        return 0.5 + noise * min(1.0, 0.5 / float(np.abs(noise).max()))

    def compute_exactly(self, heights: Construction | Sequence[Fraction]) -> tuple[Fraction, str]:
        """Return C₅ of [n] heights, rescaled to ∫h = 1, and moved towards ½ if that puts them outside [0, 1].

        Raises:
            InvalidConstruction: the heights sum to 0 or less, or a height is farther than `slack` from [0, 1].
        """
        exact, steps = [Fraction(height) for height in heights], list[str]()
        if (total := sum(exact, Fraction(0))) <= 0:
            raise InvalidConstruction("the heights sum to 0 or less, and cannot be rescaled to sum to n / 2")
        if (factor := len(exact) / (2 * total)) != 1:
            exact = [factor * height for height in exact]
            steps.append(f"rescaled by 1{factor - 1:+.3g} to the sum n / 2")
        excess = max(max(exact) - 1, -min(exact))
        if excess > Fraction(self.slack):
            raise InvalidConstruction("a height is outside [0, 1] after rescaling to the sum n / 2")
        if excess > 0:
            weight = excess / (Fraction(1, 2) + excess)
            exact = [(1 - weight) * height + weight / 2 for height in exact]  # which have the same sum
            steps.append(f"moved towards 1/2 by up to {excess:.3g}")
        integers, denominator = to_integers(exact)
        overlap = max(convolve_exactly(integers, [denominator - integer for integer in reversed(integers)]))
        return Fraction(2 * overlap, len(exact) * denominator**2), ", ".join(steps)

    def _check_bounds(self, h: Construction, when: str) -> None:
        low, high = float(h.min()), float(h.max())
        if not (low >= -self.slack and high <= 1 + self.slack):  # negated, so that NaN fails
            worst = low if low < -self.slack else high
            raise InvalidConstruction(f"a height is {worst:.9g}{when}; heights must lie in [0, 1]")

    def draw(self, figure: Figure, construction: Construction) -> None:
        """Draw the step function, and below it the overlap at each shift."""
        count = len(construction)
        steps, curve = figure.subplots(2, 1)
        edges = np.linspace(0, 2, count + 1)
        steps.stairs(construction, edges, fill=True, alpha=0.35, color="C0")
        steps.stairs(construction, edges, baseline=None, color="C0")
        steps.set(xlim=(0, 2), ylim=(0, 1.05), xlabel="x", ylabel="h(x)")
        overlap = overlaps(construction)
        top = float(overlap.max())
        curve.plot(np.arange(-(count - 1), count) * 2 / count, overlap, color="C1")
        curve.axhline(top, color="0.4", linewidth=0.8, linestyle="--")
        curve.annotate(f"C5 = {top:.10f}", (0, top), (0, 4), textcoords="offset points", ha="center")
        curve.set(xlim=(-2, 2), ylim=(0, 1.15 * top), xlabel="shift k", ylabel="overlap")


def overlaps(h: Construction) -> Construction:
    """Return the [2n − 1] overlaps of [n] heights at the shifts −(n−1)·2/n … (n−1)·2/n."""
    return convolve(h, (1 - h)[::-1]) * (2 / len(h))
