"""Base class of problems about step functions with pieces of equal width.

Invariant: a certificate states the exact value of the heights, and a bound that is rounded to the worse side.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from rlkit.envs.discovery.problem import Certificate, Construction, Problem
from rlkit.envs.discovery.problems.exact import format_decimals
from rlkit.errors import UsageError

type PieceCount = Annotated[int, Field(ge=2)]

GRID = 2.0**60
"""Verified heights are multiples of 1 / GRID, which bounds the length of numbers in exact arithmetic."""

_PLACES = 10


@dataclass(frozen=True)
class StepFunctionProblem(Problem):
    """Problem whose constructions are the heights of a step function.

    Args:
        n_points: number of pieces of random initial step functions.
        max_points: maximum number of pieces of a construction.

    Raises:
        UsageError: `n_points` is above `max_points`.
    """

    n_points: PieceCount | None = None
    max_points: PieceCount = 10_000

    shape = "a one-dimensional array of floats, the heights of the pieces from left to right"

    def __post_init__(self) -> None:
        if self.n_points is not None and self.n_points > self.max_points:
            raise UsageError(f"options: n_points is {self.n_points}, above max_points {self.max_points}")

    @abstractmethod
    def compute_exactly(self, heights: Construction | Sequence[Fraction]) -> tuple[Fraction, str]:
        """Return the exact value of heights, and a description of their exact normalisation, if any.

        Raises:
            InvalidConstruction: the heights break a rule.
        """

    def certificate(self, construction: Construction, exact: Sequence[Fraction] | None = None) -> Certificate:
        """Return the value as a fraction, and a decimal bound."""
        value, normalisation = self.compute_exactly(construction if exact is None else exact)
        bound = format_decimals(value, places=_PLACES, up=self.minimise)
        claim = f"{self.symbol} {'<=' if self.minimise else '>='} {bound}, proven exactly for the step function"
        claim += f" of these {len(construction)} heights"
        return Certificate(claim, bound, f"{value.numerator}/{value.denominator}", normalisation)
