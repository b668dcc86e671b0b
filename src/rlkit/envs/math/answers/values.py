"""What an answer can be: the types that are compared, none of which ever equals another by accident.

Invariant: frozen data; a list of several is never a scalar.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from rlkit.envs.math.answers.nodes import Expression
from rlkit.envs.math.answers.words import Unit

type Value = Scalar | Group | Interval | Union | Relation | Matrix | Text | Based | Ratio
type Suffix = Literal["", "%", "°"]
type Kind = Literal["list", "set", "tuple", "square"]


class Scalar(NamedTuple):
    """One expression.

    Args:
        expression: its value without what stands behind it.
        suffix: a percent or a degree sign.
        unit: the measure, where it is a known one.
        raw: as it is written, squeezed.
        loose: the same read with its last letter as a unit: `12h`.
    """

    expression: Expression
    suffix: Suffix = ""
    unit: Unit | None = None
    raw: str = ""
    loose: Scalar | None = None


class Group(NamedTuple):
    """Values with commas between them: bare, in braces, in parentheses, or in square brackets."""

    kind: Kind
    items: tuple[Value, ...]


class Interval(NamedTuple):
    """The real numbers between two, and which ends are closed."""

    low: Expression
    low_closed: bool
    high: Expression
    high_closed: bool


class Union(NamedTuple):
    """Intervals and single points; none is the empty set."""

    parts: tuple[Interval, ...]


class Relation(NamedTuple):
    """Expressions with relation signs between them, one less than there are sides."""

    signs: tuple[str, ...]
    sides: tuple[Value, ...]


class Matrix(NamedTuple):
    """Rows of expressions, all of one length."""

    rows: tuple[tuple[Expression, ...], ...]


class Text(NamedTuple):
    """Words, squeezed."""

    raw: str


class Based(NamedTuple):
    """Digits in a base other than ten, and the value."""

    digits: str
    base: int
    value: int | None


class Ratio(NamedTuple):
    """Expressions with colons between them."""

    terms: tuple[Expression, ...]
