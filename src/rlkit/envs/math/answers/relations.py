r"""Equations, inequalities and lists, made from their sides and items.

Invariant: a label, such as the `x` of `x=5` or the `f(x)` of `f(x)=x+1`, is distinct from a variable of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlkit.envs.math.answers.lexing.parse_errors import LimitError, MalformedError, UnsupportedError
from rlkit.envs.math.answers.nodes import MINUS_ONE, ONE, PLUS_MINUS, Builder, Call, Expression, Number, Symbol
from rlkit.envs.math.answers.numeric import CONSTANTS, Evaluator, compare_expressions, find_variables, to_float, walk
from rlkit.envs.math.answers.sets import as_union, find_variable, intersect
from rlkit.envs.math.answers.values import Group, Relation, Scalar, Text, Union, Value

MAX_ROUNDING = 0.1  # relative difference of values on both sides of `≈`


class LabelledValue(NamedTuple):
    """Value with a label: `x=5`."""

    label: str
    value: Value


def split_label(value: Value) -> LabelledValue | None:
    """Return the label and the value of an equation with a label on one side; the other side must not contain it."""
    if not isinstance(value, Relation) or value.signs != ("=",):
        return None
    left, right = value.sides
    for name, side in ((_label(left), right), (_label(right), left)):
        if name is not None and not (isinstance(side, Scalar) and name[0] in find_variables(side.expression)):
            return LabelledValue(name, side)
    return None


def make_relation(signs: tuple[str, ...], sides: tuple[Value, ...]) -> Value:
    r"""Return a relation; a chain of equal values becomes the last one, and `x=\pm 3` becomes a list.

    Raises:
        UnsupportedError: a chain of equations that are not all identities.
        MalformedError: a chain of different numbers.
    """
    first, last = sides[0], sides[-1]
    if signs == ("=",) and _is_name_tuple(first) and isinstance(last, Group):
        return last
    if len(sides) > 2 and set(signs) == {"="}:
        tail = sides[1:] if _label(first) is not None else sides
        if not all(_are_equal(side, last) for side in tail):
            if _has_variables(tail):
                raise UnsupportedError("a chain of equations")
            raise MalformedError("an equation that does not hold")
        return last if len(tail) == len(sides) else Relation(("=",), (first, last))
    if signs == ("=",) and not _has_variables(sides) and _are_equal(first, last):
        return last
    if signs == ("=",) and isinstance(last, Scalar) and len(values := expand_plus_minus(last)) > 1:
        return Group("list", tuple(Relation(signs, (first, value)) for value in values))
    return Relation(signs, sides)


def make_list(items: Sequence[Value], *, alternatives: bool, conditions: bool) -> Value:
    """Return a list, or the set that inequalities describe.

    Args:
        alternatives: whether `or` joins the items: the union of inequalities.
        conditions: whether only `and` joins them: the intersection of inequalities.

    Raises:
        UnsupportedError: inequalities are separated by commas or cannot be joined.
    """
    if len(items) == 1:
        return items[0]
    inequalities = [item for item in items if isinstance(item, Relation) and "=" not in item.signs]
    if len(inequalities) == len(items):
        unions = [union for item in inequalities if (union := as_union(item)) is not None]
        if len({find_variable(item) for item in inequalities}) != 1 or len(unions) < len(items):
            raise UnsupportedError("several inequalities")
        if conditions and (common := intersect(unions)) is not None:
            return common
        if not alternatives:
            raise UnsupportedError("several inequalities")
        return Union(tuple(part for union in unions for part in union.parts))
    labels = [split_label(item) for item in items]
    first = labels[0]
    if first is not None and all(label is None or label.label == first.label for label in labels):
        return Group("list", tuple(label.value if label else item for label, item in zip(labels, items, strict=True)))
    return Group("list", tuple(items))


def expand_plus_minus(value: Value) -> tuple[Value, ...]:
    r"""Return the values with the upper and the lower signs of `\pm`; a value without `\pm` alone."""
    if not isinstance(value, Scalar) or not any(part == PLUS_MINUS for part in walk(value.expression)):
        return (value,)
    builder = Builder()
    upper, lower = (_substitute(value.expression, sign, builder) for sign in (ONE, MINUS_ONE))
    return (value._replace(expression=upper, raw=""), value._replace(expression=lower, raw=""))


def is_name(side: Value) -> bool:
    """Tell whether a side of an equation may be the name of the other side."""
    return _label(side) is not None


def differ_widely(exact: Value, rough: Value) -> bool:
    """Tell whether two numbers differ by more than rounding."""
    match exact, rough:
        case Scalar(left, suffix, _), Scalar(right, other, _) if suffix == other:
            x, y = to_float(left), to_float(right)
            return x is not None and y is not None and abs(x - y) > MAX_ROUNDING * max(abs(x), abs(y))
        case _:
            return False


def _substitute(expression: Expression, sign: Expression, builder: Builder) -> Expression:
    match expression:
        case Symbol():
            return sign if expression == PLUS_MINUS else expression
        case Call("+", terms):
            return builder.add(_substitute(term, sign, builder) for term in terms)
        case Call("*", factors):
            return builder.multiply(_substitute(factor, sign, builder) for factor in factors)
        case Call("^", (base, exponent)):
            return builder.power(_substitute(base, sign, builder), _substitute(exponent, sign, builder))
        case Call(name, arguments):
            return builder.call(name, tuple(_substitute(argument, sign, builder) for argument in arguments))
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
    """Tell whether any side contains a variable, or is not an expression."""
    return not all(isinstance(side, Scalar) and not find_variables(side.expression) for side in sides)


def _is_name_tuple(side: Value) -> bool:
    """Tell whether a side is a tuple of names: `(x, y)`."""
    return isinstance(side, Group) and all(_label(item) is not None for item in side.items)


def _are_equal(left: Value, right: Value) -> bool:
    if not (isinstance(left, Scalar) and isinstance(right, Scalar)):
        return False
    try:
        return compare_expressions(left.expression, right.expression, Evaluator()) is True
    except LimitError:
        return False
