"""An open problem whose solutions are constructions: arrays of numbers that a verifier puts a value on.

Invariant: a value is computed from the construction alone. What a program says of its own construction is never read.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rlkit.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

type Construction = NDArray[np.float64]
type Pieces = Annotated[int, Field(ge=2)]
"""How many pieces a step function has."""

PUBLISHED = Path(__file__).with_name("published")
"""Constructions from the literature, as JSON with their sources."""

LEAST_GAIN = 1e-12
"""Share of a value that another must be better by, to be better at all."""


class Invalid(ValueError):
    """What was given is no construction of the problem; the message says why, and is fit for a prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """A construction that keeps all rules.

    Args:
        construction: as it counts, normalised where the problem says so.
        value: of it, in float64.
    """

    construction: Construction
    value: float


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is proven of a construction by exact arithmetic.

    Args:
        claim: one line for people.
        bound: the proven bound, in decimals, rounded to the safe side.
        exact: the same as a fraction, `numerator/denominator`; "" where only the bound is known.
    """

    claim: str
    bound: str
    exact: str = ""


class Problem(ABC):
    """The mathematics of one problem: what is looked for, how it is verified, and what it is worth.

    A subclass is a frozen dataclass with a name, a direction, a statement and a verifier; `docs/discovery.md` has one
    in 30 lines. Its instances are pickled with the tasks.
    """

    name: ClassVar[str]
    """In the names of tasks and files."""
    minimise: ClassVar[bool]
    """Whether smaller values are better."""
    symbol: ClassVar[str] = "value"
    """What the value is called in prompts."""
    initial: ClassVar[str] = "initial_values"
    """The variable under which a program finds the construction that it starts from."""
    shape: ClassVar[str] = "a one-dimensional array of floats"
    """What a program returns, in words."""
    baseline: ClassVar[float | None] = None
    """The best value that was found by hand; None where none is known."""
    best_known: ClassVar[float | None] = None
    """The best value that was ever published."""
    scripted: ClassVar[tuple[tuple[float, float], ...]] = ()
    """What a scripted search without a model reaches: processor seconds on one core, and the value after these."""
    polish: ClassVar[str | None] = None
    """`module:function` that improves a construction locally, `polish(construction, seconds) -> construction`. It must
    not import anything that the processes of programs have not."""

    @abstractmethod
    def statement(self) -> str:
        """What is looked for and how its value is computed, for the prompt."""

    @abstractmethod
    def verified(self, given: Construction) -> Verified:
        """The construction as it counts, and its value.

        Args:
            given: any float64 array.

        Raises:
            Invalid: it breaks a rule.
        """

    @abstractmethod
    def start(self, rng: np.random.Generator) -> Construction:
        """A valid construction to begin with."""

    def reward(self, value: float) -> float:
        """What a valid construction is paid: more for a better value, and always above 0, the reward of an invalid one.

        By default 1/value where values are minimised, and else the value; both are for positive values.
        """
        return 1 / value if self.minimise else value

    def certificate(self, construction: Construction) -> Certificate | None:
        """What can be proven of a verified construction; None where the float value is all there is."""
        return None

    def draw(self, figure: Figure, construction: Construction) -> None:
        """Draw a verified construction; by default its numbers as steps."""
        axes = figure.add_subplot()
        axes.stairs(np.ravel(construction), baseline=None)
        axes.set(xlabel="place", ylabel="value")

    def better(self, value: float, than: float) -> bool:
        """Whether one value is better than another, by more than rounding makes of it."""
        return (than - value if self.minimise else value - than) > LEAST_GAIN * abs(than)

    def scripted_best(self, cpu_s: float) -> float | None:
        """What a scripted search without a model had reached after so many processor seconds; None before the first."""
        return next((value for seconds, value in reversed(self.scripted) if seconds <= cpu_s), None)

    @property
    def direction(self) -> str:
        """`lower is better` or `higher is better`."""
        return "lower is better" if self.minimise else "higher is better"


def known(problem: Problem) -> str:
    """What is known without a model, so that nobody takes a library's search for what was learned; "" for nothing."""
    found = list[str]()
    if problem.baseline is not None:
        found.append(f"the best by hand is {problem.baseline:.9g}")
    if problem.best_known is not None:
        found.append(f"the best published {problem.best_known:.9g}")
    if problem.scripted:
        reached = ", ".join(f"{value:.7g} in {seconds:g} s" for seconds, value in problem.scripted)
        found.append(f"a scripted search without a model reaches {reached} on one core")
    return "; ".join(found)


def digest(construction: Construction) -> str:
    """The name of a construction: equal for equal numbers in the same shape, and so for 0 and −0."""
    shape = ",".join(map(str, construction.shape))
    numbers = (construction + 0.0).tobytes()
    return hashlib.blake2b(shape.encode() + b":" + numbers, digest_size=8).hexdigest()


def one_dimensional(given: Construction, *, least: int, most: int) -> Construction:
    """Copy a vector of finite numbers of such a length; raise `Invalid` for any other array."""
    if given.ndim != 1:
        raise Invalid(f"the array has {given.ndim} dimensions, and must have 1")
    if not least <= len(given) <= most:
        raise Invalid(f"the array has {len(given)} values, and must have {least} to {most}")
    if not np.isfinite(given).all():
        raise Invalid("the array holds values that are not finite")
    return given.astype(np.float64, copy=True)


def published(name: str) -> Construction:
    """A construction from the literature by its name, such as `erdos_haugland_2016`, or from a JSON file."""
    return published_with_program(name)[0]


def published_with_program(name: str) -> tuple[Construction, str]:
    """Return the construction of that name, or of a JSON file, and the file's `program`; "" where it has none.

    Raises:
        UsageError: there is none of that name, or the file holds no `values`.
    """
    path = PUBLISHED / f"{name}.json"
    if not path.is_file():
        path = Path(name)
        if path.suffix != ".json" or not path.is_file():
            names = sorted(one.stem for one in PUBLISHED.glob("*.json"))
            raise UsageError(
                f"start: there is no construction {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}, "
                "or give a .json file"
            )
    try:
        held = cast("dict[str, object]", json.loads(path.read_text()))
        return np.asarray(held["values"], np.float64), str(held.get("program", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"start: {path} holds no array of numbers under `values`: {error}") from None
