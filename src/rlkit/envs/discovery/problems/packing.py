"""Packing of circles in a square or a rectangle with the largest sum of radii.

Invariant: in exact arithmetic without slack, no circles of a verified packing overlap, and all lie in the region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from rlkit.envs.discovery.problem import Certificate, Construction, InvalidConstruction, Problem, VerifiedConstruction
from rlkit.envs.discovery.problems.exact import format_decimals
from rlkit.envs.discovery.problems.packing_steps import Region, find_box

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHRINK = 1e-12
"""Reduction of each radius if rounding makes circles overlap or leave the region."""

_CLOSE = 1e-9
"""Gap above which two circles need no exact arithmetic."""
_PLACES = 10
_REGIONS: Mapping[Region, str] = {
    "square": "the unit square [0, 1] x [0, 1]",
    "rectangle": "a rectangle [0, w] x [0, 2 - w] of perimeter 4, with any w",
}
_SCRIPTED: Mapping[tuple[int, Region], tuple[tuple[float, float], ...]] = {
    (26, "square"): ((1.0, 2.6200), (3.0, 2.6253), (10.0, 2.6307), (30.0, 2.635983)),
    (32, "square"): ((1.0, 2.9254), (3.0, 2.9273), (10.0, 2.9353), (30.0, 2.939572)),
    (21, "rectangle"): ((3.0, 2.3457), (10.0, 2.3595), (22.0, 2.365832)),
}
"""Values of `packing_steps.search` by number of circles and region, the best of several seeds."""


@dataclass(frozen=True)
class CirclePacking(Problem):
    """Packing of n circles of any radii in a region.

    Args:
        circles: number of circles; the literature has 26 and 32 in the square, and 21 in the rectangle.
        region: `square` of side 1, or `rectangle` of perimeter 4 with any sides.
    """

    circles: Annotated[int, Field(ge=1)] = 26
    region: Region = "square"

    name = "circle_packing"
    minimise = False
    symbol = "the sum of the radii"
    initial = "initial_circles"
    key = "circles"

    def __post_init__(self) -> None:
        attributes = {
            "shape": f"an array of shape ({self.circles}, 3) whose rows are x, y and radius",
            "polish": f"rlkit.envs.discovery.problems.packing_steps:polish_{self.region}",
            "scripted": _SCRIPTED.get((self.circles, self.region), ()),
        }
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def statement(self) -> str:  # noqa: D102  inherited
        return (
            f"Pack {self.circles} circles into {_REGIONS[self.region]}, so that the sum of their radii is as large as "
            f"possible. The circles may have different radii; they must not overlap, nor leave the {self.region}.\n\n"
            f"A construction is {self.shape}, all finite, with radii that are not negative. The distance of two "
            "centres must be at least the sum of their radii, and a centre at least its radius away from each side. "
            f"Where that is not so, the verifier lessens each radius by {SHRINK:g}, for rounding, and then refuses any "
            "overlap at all."
        )

    def verify(self, construction: Construction) -> VerifiedConstruction:
        """Return the circles, with radii reduced by `SHRINK` if they do not fit, and the sum of radii."""
        if construction.shape != (self.circles, 3):
            raise InvalidConstruction(
                f"the array has the shape {construction.shape}, and must have ({self.circles}, 3)"
            )
        if not np.isfinite(construction).all():
            raise InvalidConstruction("the array has values that are not finite")
        circles = construction.astype(np.float64, copy=True)
        if circles[:, 2].min() < 0:
            raise InvalidConstruction(f"a radius is {circles[:, 2].min():.9g}; radii must be at least 0")
        try:
            _check_fit(circles.tolist(), self.region)
        except InvalidConstruction:
            circles[:, 2] = np.maximum(circles[:, 2] - SHRINK, 0)
            _check_fit(circles.tolist(), self.region)
        return VerifiedConstruction(circles, float(circles[:, 2].sum()))

    def start(self, rng: np.random.Generator) -> Construction:
        """Return circles with random centres; each radius is at most half the distance to the nearest centre."""
        centres = rng.uniform(0.05, 0.95, (self.circles, 2))
        distances = np.hypot(*(centres[:, None] - centres[None]).transpose(2, 0, 1))
        np.fill_diagonal(distances, np.inf)
        sides = np.minimum(centres, 1 - centres).min(axis=1)
        radii = np.minimum(distances.min(axis=1, initial=np.inf) / 2, sides)
        return np.column_stack([centres, radii])

    def certificate(self, construction: Construction, exact: Sequence[Fraction] | None = None) -> Certificate:
        """Return the sum of the radii, rounded down. No circles overlap: `verify` has proven it, or the exact check."""
        numbers = list(exact or map(Fraction, construction.ravel().tolist()))
        radii, normalisation = numbers[2::3], ""
        try:
            _check_fit([numbers[place : place + 3] for place in range(0, len(numbers), 3)], self.region)
        except InvalidConstruction:
            radii = [max(radius - Fraction(SHRINK), Fraction(0)) for radius in radii]
            _check_fit(list(zip(numbers[::3], numbers[1::3], radii, strict=True)), self.region)
            normalisation = f"radii reduced by {SHRINK:g}"
        total = sum(radii, Fraction(0))
        bound = format_decimals(total, places=_PLACES, up=False)
        claim = f"the sum of the radii of these {len(construction)} circles is at least {bound}, proven exactly"
        return Certificate(claim, bound, f"{total.numerator}/{total.denominator}", normalisation)

    def draw(self, figure: Figure, construction: Construction) -> None:
        """Draw the circles in their region."""
        from matplotlib.patches import Circle, Rectangle

        axes = figure.add_subplot()
        width, height = find_box(construction, self.region)
        axes.add_patch(Rectangle((0, 0), width, height, fill=False, color="0.3"))
        for x, y, radius in construction.tolist():
            axes.add_patch(Circle((x, y), radius, facecolor="C0", alpha=0.35, edgecolor="C0"))
        axes.set(xlim=(-0.02, width + 0.02), ylim=(-0.02, height + 0.02), aspect="equal", xlabel="x", ylabel="y")


def _check_fit(rows: Sequence[Sequence[float | Fraction]], region: Region) -> None:
    circles = np.array(rows, np.float64)
    if np.abs(circles).max() > 2:
        raise InvalidConstruction(f"a circle leaves the {region}")
    exact = [[Fraction(number) for number in row] for row in rows]
    width = Fraction(1) if region == "square" else max(x + radius for x, _, radius in exact)
    height = Fraction(1) if region == "square" else 2 - width
    for x, y, radius in exact:
        if not 0 <= radius <= min(x, y, width - x, height - y):
            raise InvalidConstruction(f"the circle at ({float(x):.9g}, {float(y):.9g}) leaves the {region}")
    x, y, radii = circles.T
    gaps = np.hypot(x[:, None] - x, y[:, None] - y) - (radii[:, None] + radii)
    first, second = np.nonzero(np.triu(gaps < _CLOSE, 1))
    for i, j in zip(first.tolist(), second.tolist(), strict=True):
        (xi, yi, ri), (xj, yj, rj) = exact[i], exact[j]
        if (xi - xj) ** 2 + (yi - yj) ** 2 < (ri + rj) ** 2:
            raise InvalidConstruction(f"circles {i} and {j} overlap, by {-gaps[i, j]:.3g}")
