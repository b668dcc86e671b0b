"""Types of answers.

Invariant: frozen data; a list of several items is never a scalar.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from rlkit.envs.math.answers.lexing.words import Unit
from rlkit.envs.math.answers.nodes import Expression

type Value = Scalar | Group | Interval | Union | Relation | Matrix | Text | Based | Ratio
type Suffix = Literal["", "%", "°"]
type Kind = Literal["list", "set", "tuple", "square", "braces"]


class Scalar(NamedTuple):
    """Expression with suffix and unit."""

    expression: Expression  # value without suffix and unit
    suffix: Suffix = ""  # percent or degree sign
    unit: Unit | None = None  # measure, if it is in the table of units
    raw: str = ""  # normalised text, see `words.squeeze`
    loose: Scalar | None = None  # second reading with the last letter as a unit: `12h`


class Group(NamedTuple):
    """Values separated by commas: without brackets, in braces, in parentheses, or in square brackets.

    A group of kind `braces` is an item of a list without brackets. Its braces may be TeX grouping or a set: `{1}, {2}`.
    """

    kind: Kind
    items: tuple[Value, ...]


class Interval(NamedTuple):
    """Interval of real numbers, open or closed at each end."""

    low: Expression
    low_closed: bool
    high: Expression
    high_closed: bool


class Union(NamedTuple):
    """Union of intervals and single points; without parts, the empty set."""

    parts: tuple[Interval, ...]


class Relation(NamedTuple):
    """Chain of sides with relation signs between them."""

    signs: tuple[str, ...]
    sides: tuple[Value, ...]
    named: bool = False  # whether the first side may be a name of the second one: `p(t+1)`, `|z|`, `f(1)+f(2)`


class Matrix(NamedTuple):
    """Matrix with rows of equal length."""

    rows: tuple[tuple[Expression, ...], ...]


class Text(NamedTuple):
    """Words, normalised by `words.squeeze`."""

    raw: str


class Based(NamedTuple):
    """Digits in a base other than ten, with the value."""

    digits: str
    base: int
    value: int | None


class Ratio(NamedTuple):
    """Expressions separated by colons."""

    terms: tuple[Expression, ...]
