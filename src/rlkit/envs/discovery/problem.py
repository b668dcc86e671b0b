"""Open problems whose solutions are constructions: arrays of numbers that a verifier evaluates.

Invariant: a value is computed only from the construction. Values claimed by a program are never read.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from rlkit.envs.discovery.literature import PUBLISHED, PublishedValue, read_published
from rlkit.errors import RlkitError, UsageError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

type Construction = NDArray[np.float64]

MIN_RELATIVE_GAIN = 1e-12  # smallest relative difference by which one value is better than another


class InvalidConstruction(RlkitError, ValueError):
    """Array that is not a construction of the problem; the message gives the reason and may be used in a prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedConstruction:
    """Construction that satisfies all rules, with its value.

    Args:
        construction: array after the problem's normalisation.

    Raises:
        InvalidConstruction: the value is not finite.
    """

    construction: Construction
    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise InvalidConstruction(f"the value is {self.value}, which is not finite")


@dataclass(frozen=True, slots=True)
class Certificate:
    """Statement about a construction that exact arithmetic proves.

    Args:
        claim: the statement in one readable line.
        bound: proven bound in decimals, rounded so that it remains valid.
        exact: exact bound as a fraction, `numerator/denominator`; empty if only the decimals are known.
        normalisation: exact change of the numbers before the statement holds; empty if there is none.
    """

    claim: str
    bound: str
    exact: str = ""
    normalisation: str = ""


class Problem(ABC):
    """A mathematical problem: its statement, verifier and reward.

    A subclass is a frozen dataclass with a name, a direction, a statement and a verifier; `docs/discovery.md` has one
    in 30 lines. Objects of it are pickled with the tasks.
    """

    name: ClassVar[str]
    """Name in task ids and records."""
    minimise: ClassVar[bool]
    """True if smaller values are better."""
    symbol: ClassVar[str] = "value"
    """Name of the value in prompts."""
    initial: ClassVar[str] = "initial_values"
    """Name of a program's variable with the construction to start from."""
    shape: ClassVar[str] = "a one-dimensional array of floats"
    """Description of the array that a program returns."""
    key: ClassVar[str] = "values"
    """Name of the construction in JSON files that EinsteinArena reads."""
    scripted: ClassVar[tuple[tuple[float, float], ...]] = ()
    """Values that a scripted search without a model reaches, each after its processor seconds on one core."""
    polish: ClassVar[str | None] = None
    """`module:function` of a local search, `polish(construction, seconds) -> construction`. It must only import modules
    that are available to programs."""

    @abstractmethod
    def statement(self) -> str:
        """Return the task and the formula of its value, for the prompt."""

    @abstractmethod
    def verify(self, construction: Construction) -> VerifiedConstruction:
        """Return the normalised construction and its value.

        Args:
            construction: any float64 array.

        Raises:
            InvalidConstruction: the array breaks a rule.
        """

    @abstractmethod
    def start(self, rng: np.random.Generator) -> Construction:
        """Return a random valid construction."""

    def reward(self, value: float) -> float:
        """Return the reward of a valid construction, which increases with better values and is always above 0.

        The default is 1/value if values are minimised, otherwise the value; both require positive values.
        """
        return 1 / value if self.minimise else value

    def certificate(self, construction: Construction, exact: Sequence[Fraction] | None = None) -> Certificate | None:
        """Return a proof for a verified construction; None if there is only the float value.

        Args:
            exact: the same numbers before they were rounded and normalised, in C order, with denominators that are
                powers of two. The proof is then about these numbers.

        Raises:
            InvalidConstruction: the exact numbers break a rule.
        """
        return None

    def draw(self, figure: Figure, construction: Construction) -> None:
        """Draw a verified construction, by default its numbers as steps."""
        axes = figure.add_subplot()
        axes.stairs(np.ravel(construction), baseline=None)
        axes.set(xlabel="place", ylabel="value")

    def is_better(self, value: float, other: float) -> bool:
        """Return whether a value is better than another by more than rounding."""
        return (other - value if self.minimise else value - other) > MIN_RELATIVE_GAIN * abs(other)

    def scripted_best(self, cpu_s: float) -> float | None:
        """Return the value of a scripted search after `cpu_s` processor seconds; None before the first value."""
        return next((value for seconds, value in reversed(self.scripted) if seconds <= cpu_s), None)

    @property
    def published(self) -> Sequence[PublishedValue]:
        """Published values that count, best first; a problem of your own may return its own."""
        values = [
            value
            for value in read_published()
            if value.problem == self.name
            and not value.withdrawn
            and all(getattr(self, name, None) == option for name, option in value.options.items())
        ]
        return sorted(values, key=lambda value: Fraction(value.value), reverse=not self.minimise)

    @property
    def best_known(self) -> float | None:
        """Best published value, rounded so that it is not better; None if unknown."""
        return next((value.to_float(minimise=self.minimise) for value in self.published), None)

    @property
    def direction(self) -> str:
        """Direction in words: `lower is better` or `higher is better`."""
        return "lower is better" if self.minimise else "higher is better"


def describe_known_results(problem: Problem) -> str:
    """Describe results reached without a model, for comparison with what a model learns; empty if there are none."""
    published = problem.published
    results = [f"the best by hand is {value.value}" for value in published if value.by_hand][:1]
    results += [f"the best published {value}" for value in published][:1]
    if problem.scripted:
        scripted_values = ", ".join(f"{value:.7g} in {seconds:g} s" for seconds, value in problem.scripted)
        results.append(f"a scripted search without a model reaches {scripted_values} on one core")
    return "; ".join(results)


def hash_construction(construction: Construction) -> str:
    """Return the hash of a construction: equal for equal numbers in the same shape, also for 0 and −0."""
    shape = ",".join(map(str, construction.shape))
    numbers = (construction + 0.0).tobytes()
    return hashlib.blake2b(shape.encode() + b":" + numbers, digest_size=8).hexdigest()


def check_vector(values: Construction, *, min_length: int, max_length: int) -> Construction:
    """Return a copy of a vector of finite numbers, or raise `InvalidConstruction` for any other array."""
    if values.ndim != 1:
        raise InvalidConstruction(f"the array has {values.ndim} dimensions, and must have 1")
    if not min_length <= len(values) <= max_length:
        raise InvalidConstruction(f"the array has {len(values)} values, and must have {min_length} to {max_length}")
    if not np.isfinite(values).all():
        raise InvalidConstruction("the array holds values that are not finite")
    return values.astype(np.float64, copy=True)


def load_published(name: str) -> Construction:
    """Return a construction from the literature, such as `erdos_haugland_2016`, or from a JSON file."""
    return load_published_with_program(name)[0]


def load_published_with_program(name: str) -> tuple[Construction, str]:
    """Return the construction of a name or of a JSON file, and the file's `program`; "" if it has none.

    Raises:
        UsageError: no construction or file has that name, or the file has no `values`.
    """
    path = PUBLISHED / f"{name}.json"
    if not path.is_file():
        path = Path(name)
        if path.suffix != ".json" or not path.is_file():
            names = sorted(path_of.stem for path_of in PUBLISHED.glob("*_*.json"))
            raise UsageError(
                f"start: there is no construction {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}, "
                "or give a .json file"
            )
    try:
        content = cast("dict[str, object]", json.loads(path.read_text()))
        values = np.asarray(content["values"])
        if values.dtype.kind not in "iuf":
            raise TypeError("some are not numbers, or not in float64")
        return values.astype(np.float64), str(content.get("program", ""))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(f"start: {path} has no array of numbers under `values`: {error}") from None
