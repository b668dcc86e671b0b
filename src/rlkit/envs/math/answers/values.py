"""What an answer can be: the types that are compared, none of which ever equals another by accident.

Invariant: frozen data; a list of several is never a scalar.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from rlkit.envs.math.answers.lexing.words import Unit
from rlkit.envs.math.answers.nodes import Expression

type Value = Scalar | Group | Interval | Union | Relation | Matrix | Text | Based | Ratio
type Suffix = Literal["", "%", "°"]
type Kind = Literal["list", "set", "tuple", "square", "braces"]


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
    """Values with commas between them: bare, in braces, in parentheses, or in square brackets.

    One value in `braces` is an item of a bare list, in braces that may be TeX's own or those of a set: `{1}, {2}`.
    """

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
    """Expressions with relation signs between them, one less than there are sides.

    Args:
        named: the first side may be the name of the second one, and no formula: `p(t+1)`, `|z|`, `f(1)+f(2)`.
    """

    signs: tuple[str, ...]
    sides: tuple[Value, ...]
    named: bool = False


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
