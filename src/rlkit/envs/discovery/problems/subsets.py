"""Finite problems: kissing numbers, and subsets of a grid without isosceles triangles.

Vectors prove a bound on a kissing number if no two are closer than the longest is long, since the angle between any two
is then at least 60° (lemma of B.11 of AlphaEvolve 2025). Isosceles triangles include flat ones, in which a cell is the
middle of two others: problem 6.39 of Georgiev et al. 2025 (arXiv:2511.02864), studied by Charton et al. 2024
(arXiv:2411.00566). A271914 of the OEIS is another problem, which permits flat triangles.

Invariant: integers without tolerance decide whether a construction is valid.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import batched
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from rlkit.envs.discovery.problem import Certificate, Construction, InvalidConstruction, Problem, VerifiedConstruction
from rlkit.envs.discovery.problems.exact import to_integers
from rlkit.envs.discovery.problems.subset_steps import list_shell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_MEMBERS = 2000
_BITS = 53  # coordinates become multiples of 2^-53 of the power of two above the largest: integers up to 2^53
_CLOSE = 1e-9  # relative difference of squared distances above which they need no exact arithmetic


class _LargestSubset(Problem):
    """Base class of problems whose value is a number of members."""

    minimise = False

    @abstractmethod
    def check_exact(self, construction: Construction, exact: Sequence[Fraction]) -> None:
        """Raise `InvalidConstruction` if the numbers of a verified construction broke a rule before their rounding."""

    def certificate(self, construction: Construction, exact: Sequence[Fraction] | None = None) -> Certificate:
        """Return the number of members. `verify` has proven the rest, or the exact check."""
        if exact is not None:
            self.check_exact(construction, exact)
        count = len(construction)
        return Certificate(f"{self.symbol} is at least {count}, proven exactly", str(count), f"{count}/1")


@dataclass(frozen=True)
class Kissing(_LargestSubset):
    """Set of vectors at angles of at least 60°.

    Args:
        dimension: dimension of the spheres.
    """

    dimension: Annotated[int, Field(ge=2, le=16)] = 11

    name = "kissing"
    symbol = "the number of vectors"
    initial = "initial_vectors"
    polish = "rlkit.envs.discovery.problems.subset_steps:polish_kissing"

    def __post_init__(self) -> None:
        shape = f"an array of shape (k, {self.dimension}) whose rows are k vectors, with any k from 1 to {_MAX_MEMBERS}"
        object.__setattr__(self, "shape", shape)

    def statement(self) -> str:  # noqa: D102  inherited
        return (
            f"The kissing number of dimension {self.dimension} is the largest number of unit spheres that touch a unit "
            "sphere without overlap. Find as many vectors as possible, so that no two are closer to each other than "
            "the longest of all is long; their directions are then the directions of such spheres.\n\n"
            f"A construction is {self.shape}, finite and not 0. The verifier works without tolerance, in integers: it "
            "rounds coordinates to multiples of 2^-53 of the power of two above the largest. Use integers where "
            "distances are equal. Vectors may have one more coordinate if the coordinates of each add up to 0."
        )

    def verify(self, construction: Construction) -> VerifiedConstruction:
        """Return the rounded vectors in sorted order, and their number."""
        count, columns = construction.shape if construction.ndim == 2 else (0, 0)
        if not 1 <= count <= _MAX_MEMBERS or columns - self.dimension not in (0, 1):
            raise InvalidConstruction(f"the array has the shape {construction.shape}, and must be {self.shape}")
        if not np.isfinite(construction).all():
            raise InvalidConstruction("the array has values that are not finite")
        exponent = int(np.frexp(np.abs(construction).max())[1]) - _BITS
        vectors = np.round(np.ldexp(construction, -exponent)) + 0.0
        vectors = vectors[np.lexsort(vectors.T[::-1])]
        self._check_vectors(vectors.astype(np.int64).tolist())
        return VerifiedConstruction(np.ldexp(vectors, exponent), float(len(vectors)))

    def check_exact(self, construction: Construction, exact: Sequence[Fraction]) -> None:  # noqa: D102  inherited
        numbers, _ = to_integers(exact)
        self._check_vectors(list(batched(numbers, construction.shape[1])))

    def _check_vectors(self, rows: Sequence[Sequence[int]]) -> None:
        if len(rows[0]) > self.dimension and any(map(sum, rows)):
            raise InvalidConstruction(f"vectors of {len(rows[0])} coordinates must each add up to 0")
        squares = [sum(number * number for number in row) for row in rows]
        if min(squares) == 0:
            raise InvalidConstruction("a vector is 0, or too short beside the largest coordinate")
        largest = max(abs(number) for row in rows for number in row)
        vectors = np.array([[number / largest for number in row] for row in rows])
        norms = (vectors**2).sum(axis=1)
        relative = (norms[:, None] + norms - 2 * vectors @ vectors.T) / norms.max()
        for i, j in np.argwhere(np.triu(relative < 1 + _CLOSE, 1)).tolist():
            if sum((a - b) ** 2 for a, b in zip(rows[i], rows[j], strict=True)) < max(squares):
                share = max(float(relative[i, j]), 0) ** 0.5
                raise InvalidConstruction(f"two vectors are {share:.9g} times the longest length apart, and must be 1")

    def start(self, rng: np.random.Generator) -> Construction:
        """Return vectors of equal length in a random order, each of which fits the earlier ones."""
        shell = rng.permutation(list_shell(self.dimension))
        chosen = shell[:1]
        for vector in shell[1 : 2 * self.dimension]:
            if (2 * chosen @ vector <= vector @ vector).all():
                chosen = np.vstack([chosen, vector])
        return chosen

    def draw(self, figure: Figure, construction: Construction) -> None:
        """Draw the inner products of all pairs of vectors."""
        scaled = construction / float(np.abs(construction).max())
        figure.add_subplot(xlabel="vector", ylabel="vector").imshow(scaled @ scaled.T)


@dataclass(frozen=True)
class NoIsosceles(_LargestSubset):
    """Set of cells of a square grid without isosceles triangles.

    Args:
        size: number of rows and of columns.
    """

    size: Annotated[int, Field(ge=2, le=100)] = 16

    name = "no_isosceles"
    symbol = "the number of cells"
    initial = "initial_cells"
    shape = "an array of shape (k, 2) whose rows are the row and the column of each cell"
    polish = "rlkit.envs.discovery.problems.subset_steps:polish_isosceles"

    def statement(self) -> str:  # noqa: D102  inherited
        return (
            f"Find as many cells as possible of a grid of {self.size} rows and {self.size} columns, so that no cell is "
            "equally far from two others: no three form an isosceles triangle, not even three on a line.\n\nA "
            f"construction is {self.shape}, whole numbers from 0 to {self.size - 1}. The cells are distinct, in any "
            "order. The verifier compares squared distances, which are integers."
        )

    def verify(self, construction: Construction) -> VerifiedConstruction:
        """Return the cells in sorted order, and their number."""
        shape = construction.shape
        if len(shape) != 2 or shape[1] != 2 or not 1 <= shape[0] <= self.size**2:
            raise InvalidConstruction(f"the array has the shape {shape}, and must be {self.shape}, at least one")
        if not (np.isin(construction, np.arange(self.size))).all():
            raise InvalidConstruction(f"a cell is not two whole numbers from 0 to {self.size - 1}")
        cells = np.unique(construction.astype(np.int64), axis=0)
        if len(cells) < len(construction):
            raise InvalidConstruction("two cells are the same")
        for apex in cells:
            distances = ((cells - apex) ** 2).sum(axis=1)
            counts = np.bincount(distances)
            if counts.max() > 1:
                first, second, *_ = cells[distances == counts.argmax()].tolist()
                raise InvalidConstruction(f"the cell {apex.tolist()} is equally far from {first} and {second}")
        return VerifiedConstruction(cells.astype(np.float64), float(len(cells)))

    def check_exact(self, construction: Construction, exact: Sequence[Fraction]) -> None:  # noqa: D102  inherited
        if any(number.denominator > 1 for number in exact):
            raise InvalidConstruction("a cell is not two whole numbers")

    def start(self, rng: np.random.Generator) -> Construction:
        """Return two cells, one of them in the last row."""
        last, *other = rng.integers(self.size - 1, size=3)
        return np.array([[self.size - 1, last], other], np.float64)

    def draw(self, figure: Figure, construction: Construction) -> None:
        """Draw the cells in their grid."""
        grid = np.zeros((self.size, self.size))
        grid[tuple(construction.astype(np.int64).T)] = 1
        figure.add_subplot(xlabel="column", ylabel="row").imshow(grid, cmap="Greys")
