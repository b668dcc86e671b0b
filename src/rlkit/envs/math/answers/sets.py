"""Sets of real numbers: intervals, points, and solutions of inequalities.

Invariant: equal sets have the same normal form if their ends are real constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlkit.envs.math.answers.nodes import INFINITY, MINUS_ONE, Call, Expression, Number, Symbol
from rlkit.envs.math.answers.numeric import Evaluator, Verdict, compare_expressions, find_variables, to_float
from rlkit.envs.math.answers.values import Group, Interval, Relation, Scalar, Union, Value

MINUS_INFINITY = Call("*", (MINUS_ONE, INFINITY))
REALS = Interval(MINUS_INFINITY, False, INFINITY, False)

FLIPPED_SIGNS = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "=": "=", "≠": "≠"}


def make_interval(low: Expression, low_closed: bool, high: Expression, high_closed: bool) -> Interval:
    """Return the interval; an infinite end is never closed."""
    return Interval(low, low_closed and not _is_infinite(low), high, high_closed and not _is_infinite(high))


def as_union(value: Value) -> Union | None:
    """Return the set of real numbers that a value describes, or None.

    A pair in parentheses is an open interval, and an inequality of one variable is the set of its solutions.
    """
    match value:
        case Union():
            return value
        case Interval():
            return Union((value,))
        case Group("tuple" | "square" as kind, (Scalar(low, "", _), Scalar(high, "", _))):
            return Union((make_interval(low, kind == "square", high, kind == "square"),))
        case Group("set", items):
            ends = tuple(item.expression for item in items if isinstance(item, Scalar))
            return (
                Union(tuple(make_interval(end, True, end, True) for end in ends)) if len(ends) == len(items) else None
            )
        case Relation():
            return solve(value)
        case _:
            return None


def find_variable(relation: Relation) -> str | None:
    """Return the variable that an inequality bounds; None for any other relation."""
    names = [
        side.expression.name
        for side in relation.sides
        if isinstance(side, Scalar) and isinstance(side.expression, Symbol) and find_variables(side.expression) - {"∞"}
    ]
    return names[0] if len(names) == 1 and "=" not in relation.signs else None


def solve(relation: Relation) -> Union | None:
    """Return the solutions of an inequality such as `x<2` or `-2≤x<5`; None for any other form."""
    name = find_variable(relation)
    relation = turn_upwards(relation)
    sides = [side.expression for side in relation.sides if isinstance(side, Scalar)]
    if name is None or len(sides) != len(relation.sides) or len(sides) > 3:
        return None
    at = sides.index(Symbol(name))
    if any(find_variables(side) - {"∞"} for side in sides if side != sides[at]):
        return None
    signs = relation.signs
    if len(sides) == 2:
        bound, closed = sides[1 - at], signs[0] == "≤"
        below = make_interval(MINUS_INFINITY, False, bound, closed)
        above = make_interval(bound, closed, INFINITY, False)
        return Union((below, above) if signs == ("≠",) else (below,) if at == 0 else (above,))
    if at != 1 or not set(signs) <= {"<", "≤"}:
        return None
    return Union((make_interval(sides[0], signs[0] == "≤", sides[2], signs[1] == "≤"),))


def flip(relation: Relation) -> Relation:
    """Return the relation read from right to left."""
    return Relation(tuple(FLIPPED_SIGNS[sign] for sign in relation.signs[::-1]), relation.sides[::-1])


def turn_upwards(relation: Relation) -> Relation:
    """Return the relation with the smaller side on the left, if it begins with `>` or `≥`."""
    return flip(relation) if relation.signs[0] in (">", "≥") else relation


def intersect(unions: Sequence[Union]) -> Union | None:
    """Return the intersection of intervals; None if it is empty, or a set has several intervals."""
    parts = [union.parts[0] for union in unions if len(union.parts) == 1]
    ends = [(to_float(part.low), to_float(part.high), part) for part in parts]
    lows = [(low, not part.low_closed, part.low) for low, _, part in ends if low is not None]
    highs = [(high, part.high_closed, part.high) for _, high, part in ends if high is not None]
    if not len(lows) == len(highs) == len(unions):
        return None
    low, low_open, low_end = max(lows, key=lambda end: end[:2])
    high, high_closed, high_end = min(highs, key=lambda end: end[:2])
    return Union((Interval(low_end, not low_open, high_end, high_closed),)) if low < high else None


def subtract_points(union: Union, removed: Union) -> Union | None:
    """Remove points from a set; None if `removed` has intervals, or an end is no real constant."""
    points = [(part.low, to_float(part.low)) for part in removed.parts if part.low == part.high]
    if len(points) != len(removed.parts):
        return None
    parts = list(union.parts)
    for point, at in points:
        remaining: list[Interval] = []
        for part in parts:
            low, high = to_float(part.low), to_float(part.high)
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


def compare_unions(left: Union, right: Union, evaluate: Evaluator) -> Verdict:
    """Compare two sets; None if undecided."""
    left_parts, right_parts = normalise(left).parts, normalise(right).parts
    if len(left_parts) != len(right_parts):
        return False
    verdict: Verdict = True
    for left_part, right_part in zip(left_parts, right_parts, strict=True):
        if (left_part.low_closed, left_part.high_closed) != (right_part.low_closed, right_part.high_closed):
            return False
        for left_end, right_end in ((left_part.low, right_part.low), (left_part.high, right_part.high)):
            is_equal = compare_expressions(left_end, right_end, evaluate)
            if is_equal is False:
                return False
            verdict = verdict and is_equal
    return verdict


def normalise(union: Union) -> Union:
    """Sort the parts and join those that touch; unchanged if an end is no real constant."""
    ends = [(to_float(part.low), to_float(part.high), part) for part in union.parts]
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


def _is_infinite(value: Expression) -> bool:
    match value:
        case Symbol("∞") | Call("*", (Number(), Symbol("∞"))):
            return True
        case _:
            return False
