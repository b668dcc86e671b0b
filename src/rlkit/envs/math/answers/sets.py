"""Sets of real numbers: intervals, points, what inequalities describe, and when two of them are one.

Invariant: two ways to write one set have one normal form, as long as their ends are real constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlkit.envs.math.answers.nodes import INFINITY, MINUS_ONE, Expression, Number, Product, Symbol
from rlkit.envs.math.answers.numeric import Evaluator, Verdict, equal, real, variables
from rlkit.envs.math.answers.values import Group, Interval, Relation, Scalar, Union, Value

MINUS_INFINITY = Product((MINUS_ONE, INFINITY))
REALS = Interval(MINUS_INFINITY, False, INFINITY, False)

FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "=": "=", "≠": "≠"}
_BELOW = {"<": False, "≤": True}
"""Signs with the smaller side on the left, and whether they allow equality."""


def interval(low: Expression, low_closed: bool, high: Expression, high_closed: bool) -> Interval:
    """The interval; an infinite end is never closed."""
    return Interval(low, low_closed and not _infinite(low), high, high_closed and not _infinite(high))


def as_union(value: Value) -> Union | None:
    """The set of real numbers that a value describes; None where it describes none.

    A pair in parentheses is an open interval here, and an inequality of one variable is its solutions.
    """
    match value:
        case Union():
            return value
        case Interval():
            return Union((value,))
        case Group("tuple" | "square" as kind, (Scalar(low, "", _), Scalar(high, "", _))):
            return Union((interval(low, kind == "square", high, kind == "square"),))
        case Group("set", items):
            points = tuple(item.expression for item in items if isinstance(item, Scalar))
            return Union(tuple(interval(at, True, at, True) for at in points)) if len(points) == len(items) else None
        case Relation():
            return solutions(value)
        case _:
            return None


def variable(relation: Relation) -> str | None:
    """The one variable of an inequality that says between what it lies; None for any other relation."""
    names = [
        side.expression.name
        for side in relation.sides
        if isinstance(side, Scalar) and isinstance(side.expression, Symbol) and variables(side.expression) - {"∞"}
    ]
    return names[0] if len(names) == 1 and "=" not in relation.signs else None


def solutions(relation: Relation) -> Union | None:
    """What an inequality such as `x<2` or `-2≤x<5` allows; None where it is not of that form."""
    name = variable(relation)
    sides = [side.expression for side in relation.sides if isinstance(side, Scalar)]
    if name is None or len(sides) != len(relation.sides) or len(sides) > 3:
        return None
    at = sides.index(Symbol(name))
    if any(variables(side) - {"∞"} for side in sides if side != sides[at]):
        return None
    signs = relation.signs
    if len(sides) == 2:
        sign, bound = (signs[0], sides[1]) if at == 0 else (FLIPPED[signs[0]], sides[0])
        return _half_line(sign, bound)
    if at != 1:
        return None
    if signs[0] in (">", "≥"):
        sides, signs = sides[::-1], tuple(FLIPPED[sign] for sign in signs[::-1])
    if not all(sign in _BELOW for sign in signs):
        return None
    return Union((interval(sides[0], _BELOW[signs[0]], sides[2], _BELOW[signs[1]]),))


def intersection(unions: Sequence[Union]) -> Union | None:
    """What intervals have in common; None where that is nothing, or there is more than one in a set."""
    low, low_closed, high, high_closed = REALS
    for union in unions:
        if len(union.parts) != 1:
            return None
        part = union.parts[0]
        ends = [real(end) for end in (low, high, part.low, part.high)]
        if None in ends:
            return None
        least, most, own_least, own_most = (end or 0.0 for end in ends)
        if own_least > least or (own_least == least and not part.low_closed):
            low, low_closed = part.low, part.low_closed
        if own_most < most or (own_most == most and not part.high_closed):
            high, high_closed = part.high, part.high_closed
    least, most = real(low), real(high)
    if least is None or most is None or least >= most:
        return None
    return Union((Interval(low, low_closed, high, high_closed),))


def without(whole: Union, removed: Union) -> Union | None:
    """A set without some points of it; None where more than points is removed, or an end is no real constant."""
    points = [(part.low, real(part.low)) for part in removed.parts if part.low == part.high]
    if len(points) != len(removed.parts):
        return None
    parts = list(whole.parts)
    for point, at in points:
        remaining: list[Interval] = []
        for part in parts:
            low, high = real(part.low), real(part.high)
            if at is None or low is None or high is None:
                return None
            if not low <= at <= high:
                remaining.append(part)
                continue
            if low < at:
                remaining.append(part._replace(high=point, high_closed=False))
            if at < high:
                remaining.append(part._replace(low=point, low_closed=False))
        parts = remaining
    return Union(tuple(parts))


def same(left: Union, right: Union, evaluate: Evaluator) -> Verdict:
    """Whether two sets are one; None where that cannot be told."""
    ones, others = normal(left).parts, normal(right).parts
    if len(ones) != len(others):
        return False
    verdict: Verdict = True
    for one, other in zip(ones, others, strict=True):
        if (one.low_closed, one.high_closed) != (other.low_closed, other.high_closed):
            return False
        for end, other_end in ((one.low, other.low), (one.high, other.high)):
            truth = equal(end, other_end, evaluate)
            if truth is False:
                return False
            verdict = verdict and truth
    return verdict


def normal(union: Union) -> Union:
    """Its parts in order, those that touch as one; as it is where an end is no real constant."""
    ends = [(real(part.low), real(part.high), part) for part in union.parts]
    keyed = [(low, not part.low_closed, high, part) for low, high, part in ends if low is not None and high is not None]
    if len(keyed) != len(ends) or any(low > high for low, _, high, _ in keyed):
        return union
    merged: list[Interval] = []
    reached = -math.inf
    for low, _, high, part in sorted(keyed, key=lambda entry: entry[:3]):
        last = merged[-1] if merged else None
        if last is None or low > reached or (low == reached and not (part.low_closed or last.high_closed)):
            merged.append(part)
            reached = high
        elif high > reached:
            merged[-1] = last._replace(high=part.high, high_closed=part.high_closed)
            reached = high
        elif high == reached and part.high_closed:
            merged[-1] = last._replace(high_closed=True)
    return Union(tuple(merged))


def _half_line(sign: str, bound: Expression) -> Union | None:
    match sign:
        case "<" | "≤":
            return Union((interval(MINUS_INFINITY, False, bound, sign == "≤"),))
        case ">" | "≥":
            return Union((interval(bound, sign == "≥", INFINITY, False),))
        case "≠":
            return Union((interval(MINUS_INFINITY, False, bound, False), interval(bound, False, INFINITY, False)))
        case _:
            return None


def _infinite(value: Expression) -> bool:
    match value:
        case Symbol("∞") | Product((Number(), Symbol("∞"))):
            return True
        case _:
            return False
