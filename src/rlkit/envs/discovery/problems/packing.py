"""Packing of circles in a square, a rectangle or a disc with the largest sum of radii.

Invariant: in exact arithmetic without slack, no circles of a verified packing overlap, and all lie in the region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import batched
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from rlkit.envs.discovery.problem import Certificate, Construction, InvalidConstruction, Problem, VerifiedConstruction
from rlkit.envs.discovery.problems.exact import format_decimals
from rlkit.envs.discovery.problems.packing_steps import Container, Region, compute_distances

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHRINK = 1e-12  # reduction of each radius if rounding makes circles overlap or leave the region

_CLOSE = 1e-9  # gap above which two circles need no exact arithmetic
_PLACES = 10
_REGIONS: Mapping[Region, tuple[str, str, str]] = {
    "square": ("square", "the unit square [0, 1] x [0, 1]", "each side"),
    "rectangle": ("rectangle", "a rectangle [0, w] x [0, 2 - w] of perimeter 4, with any w", "each side"),
    "circle": ("disc", "the disc of radius 1 around (0, 0)", "the edge of the disc"),
}
"""Noun, description and border of each region, for the statement and for errors."""
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
        region: `square` of side 1, `rectangle` of perimeter 4 with any sides, or `circle` of radius 1.
    """

    circles: Annotated[int, Field(ge=1, le=5000)] = 26
    region: Region = "square"

    name = "circle_packing"
    minimise = False
    symbol = "the sum of the radii"
    initial = "initial_circles"
    key = "circles"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", f"an array of shape ({self.circles}, 3) whose rows are x, y and radius")
        object.__setattr__(self, "polish", f"rlkit.envs.discovery.problems.packing_steps:polish_{self.region}")
        object.__setattr__(self, "scripted", _SCRIPTED.get((self.circles, self.region), ()))

    def statement(self) -> str:  # noqa: D102  inherited
        noun, description, border = _REGIONS[self.region]
        return (
            f"Pack {self.circles} circles into {description}, so that the sum of their radii is as large as "
            f"possible. The circles may have different radii; they must not overlap, nor leave the {noun}.\n\n"
            f"A construction is {self.shape}, all finite, with radii that are not negative. The distance of two "
            f"centres must be at least the sum of their radii, and a centre at least its radius away from {border}. "
            f"Where that is not so, the verifier lessens each radius by {SHRINK:g}, for rounding, and then refuses any "
            "overlap at all."
        )

    def verify(self, construction: Construction) -> VerifiedConstruction:
        """Return the circles, with radii reduced by `SHRINK` if they do not fit, and the sum of radii."""
        if construction.shape != (shape := (self.circles, 3)):
            raise InvalidConstruction(f"the array has the shape {construction.shape}, and must have {shape}")
        if not np.isfinite(construction).all():
            raise InvalidConstruction("the array has values that are not finite")
        if construction[:, 2].min() < 0:
            raise InvalidConstruction(f"a radius is {construction[:, 2].min():.9g}; radii must be at least 0")
        circles = np.array(_shrink_to_fit(construction.tolist(), self.region)[0])
        return VerifiedConstruction(circles, float(circles[:, 2].sum()))

    def start(self, rng: np.random.Generator) -> Construction:
        """Return circles with random centres; each radius is at most half the distance to the nearest centre."""
        centres = rng.uniform(0.05, 0.95, (self.circles, 2))
        if self.region == "circle":
            centres = (2 * centres - 1) / 2**0.5  # the square that has its corners on the circle
        _, room = Container(self.region, np.zeros((1, 3))).find_sides(centres)
        radii = np.minimum(compute_distances(centres).min(axis=1) / 2, room.min(axis=0))
        return np.column_stack([centres, radii])

    def certificate(self, construction: Construction, exact: Sequence[Fraction] | None = None) -> Certificate:
        """Return the sum of the radii, rounded down. No circles overlap: `verify` has proven it, or the exact check."""
        numbers = exact or map(Fraction, construction.ravel().tolist())
        circles, normalisation = _shrink_to_fit(list(batched(numbers, 3)), self.region)
        total = sum((radius for _, _, radius in circles), Fraction(0))
        bound = format_decimals(total, places=_PLACES, up=False)
        claim = f"the sum of the radii of these {len(construction)} circles is at least {bound}, proven exactly"
        return Certificate(claim, bound, f"{total.numerator}/{total.denominator}", normalisation)

    def draw(self, figure: Figure, construction: Construction) -> None:
        """Draw the circles in their region."""
        from matplotlib.patches import Circle, Rectangle

        axes = figure.add_subplot(aspect="equal", xlabel="x", ylabel="y")
        container = Container(self.region, construction)
        border = Circle((0, 0), 1) if container.is_disc else Rectangle((0, 0), *container.high)
        axes.add_patch(border).set(fill=False, color="0.3")
        for x, y, radius in construction.tolist():
            axes.add_patch(Circle((x, y), radius, facecolor="C0", alpha=0.35, edgecolor="C0"))
        axes.autoscale_view()


def _shrink_to_fit[Number: (float, Fraction)](
    circles: Sequence[Sequence[Number]], region: Region
) -> tuple[Sequence[Sequence[Number]], str]:
    """Return the circles, with radii reduced by `SHRINK` if they do not fit, and a description of this change."""
    try:
        _check_fit(circles, region)
        return circles, ""
    except InvalidConstruction:
        shrink = type(circles[0][2])(SHRINK)
    circles = [[x, y, max(radius - shrink, 0 * shrink)] for x, y, radius in circles]
    _check_fit(circles, region)
    return circles, f"radii reduced by {SHRINK:g}"


def _check_fit(rows: Sequence[Sequence[float | Fraction]], region: Region) -> None:
    noun = _REGIONS[region][0]
    exact = [[Fraction(number) for number in row] for row in rows]
    width = max(x + radius for x, _, radius in exact) if region == "rectangle" else Fraction(1)
    for x, y, radius in exact:
        if region == "circle":
            is_inside = radius <= 1 and x * x + y * y <= (1 - radius) ** 2
        else:
            is_inside = radius <= min(x, y, width - x, 2 - width - y)
        if radius < 0 or not is_inside:
            raise InvalidConstruction(f"the circle at ({float(x):.9g}, {float(y):.9g}) leaves the {noun}")
    x, y, radii = np.array(rows, np.float64).T
    for i, (xi, yi, ri) in enumerate(exact):  # one row of distances at a time, for memory
        gaps = np.hypot(x - x[i], y - y[i]) - (radii + radii[i])
        for j in (i + 1 + np.flatnonzero(gaps[i + 1 :] < _CLOSE)).tolist():
            xj, yj, rj = exact[j]
            if (xi - xj) ** 2 + (yi - yj) ** 2 < (ri + rj) ** 2:
                raise InvalidConstruction(f"circles {i} and {j} overlap, by {-gaps[j]:.3g}")
