r"""Equations, inequalities and lists, put together from their sides and items.

Invariant: a label, such as the `x` of `x=5` or the `f(x)` of `f(x)=x+1`, is told from a variable of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlkit.envs.math.answers.lexing.faults import Malformed, Monstrous, Unreadable
from rlkit.envs.math.answers.nodes import (
    MINUS_ONE,
    ONE,
    PLUS_MINUS,
    Builder,
    Call,
    Expression,
    Number,
    Power,
    Product,
    Sum,
    Symbol,
)
from rlkit.envs.math.answers.numeric import CONSTANTS, Evaluator, equal, parts, real, variables
from rlkit.envs.math.answers.sets import FLIPPED, as_union, intersection, variable
from rlkit.envs.math.answers.values import Group, Relation, Scalar, Text, Union, Value

NEAR = 0.1
"""What `≈` may stand between: relative to the larger one."""


class Labelled(NamedTuple):
    """A value with its name before it: `x=5`."""

    label: str
    value: Value


def labelled(value: Value) -> Labelled | None:
    """The label and the value of an equation that has one on either side, which the other side does not hold."""
    if not isinstance(value, Relation) or value.signs != ("=",):
        return None
    left, right = value.sides
    for name, side in ((_label(left), right), (_label(right), left)):
        if name is not None and not (isinstance(side, Scalar) and name[0] in variables(side.expression)):
            return Labelled(name, side)
    return None


def related(signs: tuple[str, ...], sides: tuple[Value, ...]) -> Value:
    r"""A relation; a chain of equal values is the last one, and `x=\pm 3` is a list.

    Raises:
        Unreadable: a chain of equations that are not all identities.
        Malformed: a chain of numbers that differ.
    """
    first, last = sides[0], sides[-1]
    if signs == ("=",) and _names(first) and isinstance(last, Group):
        return last
    if len(sides) > 2 and set(signs) == {"="}:
        tail = sides[1:] if _label(first) is not None else sides
        if not all(_equal(side, last) for side in tail):
            if _has_variables(tail):
                raise Unreadable("a chain of equations")
            raise Malformed("an equation that does not hold")
        return last if len(tail) == len(sides) else Relation(("=",), (first, last))
    if signs == ("=",) and not _has_variables(sides) and _equal(first, last):
        return last
    if signs == ("=",) and isinstance(last, Scalar) and len(both := expanded(last)) > 1:
        return Group("list", tuple(Relation(signs, (first, one)) for one in both))
    return Relation(signs, sides)


def listed(items: Sequence[Value], *, alternatives: bool, conditions: bool) -> Value:
    """A list.

    Args:
        items: at least two of them, or one that turned out to be several.
        alternatives: `or` stands between them: inequalities so joined are one set.
        conditions: only `and` does: inequalities so joined hold all at once.

    Raises:
        Unreadable: inequalities with a comma between them, or that cannot be joined.
    """
    if len(items) == 1:
        return items[0]
    inequalities = [item for item in items if isinstance(item, Relation) and "=" not in item.signs]
    if len(inequalities) == len(items):
        unions = [union for item in inequalities if (union := as_union(item)) is not None]
        if len({variable(item) for item in inequalities}) != 1 or len(unions) < len(items):
            raise Unreadable("several inequalities")
        if conditions and (common := intersection(unions)) is not None:
            return common
        if not alternatives:
            raise Unreadable("several inequalities")
        return Union(tuple(part for union in unions for part in union.parts))
    labels = [labelled(item) for item in items]
    first = labels[0]
    if first is not None and all(found is None or found.label == first.label for found in labels):
        return Group("list", tuple(found.value if found else item for found, item in zip(labels, items, strict=True)))
    return Group("list", tuple(items))


def expanded(value: Value) -> tuple[Value, ...]:
    r"""Both values of what holds `\pm`, the upper signs and the lower ones; otherwise the value alone."""
    if not isinstance(value, Scalar) or not any(part == PLUS_MINUS for part in parts(value.expression)):
        return (value,)
    builder = Builder()
    upper, lower = (_substituted(value.expression, sign, builder) for sign in (ONE, MINUS_ONE))
    return (value._replace(expression=upper, raw=""), value._replace(expression=lower, raw=""))


def is_name(side: Value) -> bool:
    """Whether it may be the name of what stands on the other side of an equation."""
    return _label(side) is not None


def are_far(exact: Value, rough: Value) -> bool:
    """Whether two numbers differ by more than rounding."""
    match exact, rough:
        case Scalar(left, suffix, _), Scalar(right, other, _) if suffix == other:
            one, two = real(left), real(right)
            return one is not None and two is not None and abs(one - two) > NEAR * max(abs(one), abs(two))
        case _:
            return False


def flipped(relation: Relation) -> Relation:
    """The same read from right to left."""
    return Relation(tuple(FLIPPED[sign] for sign in relation.signs[::-1]), relation.sides[::-1])


def _substituted(expression: Expression, sign: Expression, builder: Builder) -> Expression:
    match expression:
        case Symbol():
            return sign if expression == PLUS_MINUS else expression
        case Sum(terms):
            return builder.add(_substituted(term, sign, builder) for term in terms)
        case Product(factors):
            return builder.multiply(_substituted(factor, sign, builder) for factor in factors)
        case Power(base, exponent):
            return builder.power(_substituted(base, sign, builder), _substituted(exponent, sign, builder))
        case Call(name, arguments):
            return builder.call(name, tuple(_substituted(argument, sign, builder) for argument in arguments))
        case Number():
            return expression


def _label(side: Value) -> str | None:
    match side:
        case Text(raw):
            return raw
        case Scalar(Symbol(name)) if name not in CONSTANTS and name != "∞":
            return name
        case _:
            return None


def _has_variables(sides: Sequence[Value]) -> bool:
    """Whether any side holds a variable, or is no expression."""
    return not all(isinstance(side, Scalar) and not variables(side.expression) for side in sides)


def _names(side: Value) -> bool:
    """Whether it is `(x, y)`: the names of what follows."""
    return isinstance(side, Group) and all(_label(item) is not None for item in side.items)


def _equal(left: Value, right: Value) -> bool:
    if not (isinstance(left, Scalar) and isinstance(right, Scalar)):
        return False
    try:
        return equal(left.expression, right.expression, Evaluator()) is True
    except Monstrous:
        return False
