"""Predicates of values, and conversions of a value to another type: sorted list, difference of two sides, words.

Invariant: nothing is compared here; a conversion that does not apply to a value returns None or no text.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.envs.math.answers import numeric, sets
from rlkit.envs.math.answers.nodes import Builder, Call, Expression, Symbol
from rlkit.envs.math.answers.relations import split_label
from rlkit.envs.math.answers.values import Group, Interval, Relation, Scalar, Text, Union, Value

_COORDINATES = frozenset("xyz")


def is_set(value: Value) -> bool:
    """Tell whether a value is a set of real numbers; an inequality describes one."""
    return isinstance(value, Interval | Union) or (
        isinstance(value, Relation) and sets.find_variable(value) is not None
    )


def is_unsolved(value: Value) -> bool:
    """Tell whether a value is an inequality of one variable that `sets.solve` cannot solve: `|x|<1`."""
    if not isinstance(value, Relation) or "=" in value.signs or sets.solve(value) is not None:
        return False
    variable_sets = [numeric.find_variables(side.expression) for side in value.sides if isinstance(side, Scalar)]
    return len(variable_sets) == len(value.sides) and sum(map(len, variable_sets)) == 1


def is_collection(value: Value) -> bool:
    """Tell whether a value may have several items, so braces around it change its meaning."""
    return is_set(value) or (isinstance(value, Group) and value.kind not in ("tuple", "square"))


def find_named_value(relation: Relation) -> Value | None:
    """Return the right side of an equation whose left side may be the quantity asked for, 5 in `|z|=5`, or None."""
    if relation.signs != ("=",) or split_label(relation) is not None:
        return None
    left, right = relation.sides
    is_compound = isinstance(left, Scalar) and len(numeric.find_variables(left.expression)) > 1
    if not (relation.named or is_compound) or not isinstance(right, Scalar) or numeric.find_variables(right.expression):
        return None
    return right


def has_braced_item(group: Group) -> bool:
    """Tell whether a group is a list with an item in braces, which may be TeX grouping."""
    return group.kind == "list" and any(isinstance(item, Group) and item.kind == "braces" for item in group.items)


def has_labels(group: Group) -> bool:
    """Tell whether a group is a list whose items all have labels: `x=1, y=2`."""
    return group.kind == "list" and all(split_label(item) is not None for item in group.items)


def sort_by_coordinate(group: Group) -> Sequence[Value]:
    """Return the items, sorted by coordinate if all have one as a label: `y=1, x=2`."""
    names = [item_label.label for item in group.items if (item_label := split_label(item)) is not None]
    if group.kind != "list" or len(names) < len(group.items) or not set(names) <= _COORDINATES:
        return group.items
    return [item for _, item in sorted(zip(names, group.items, strict=True), key=lambda named: named[0])]


def raw_text(value: Value) -> str:
    """Return the original text of a value, or an empty string."""
    return value.raw if isinstance(value, Text | Scalar) else ""


def is_letter_product(value: Scalar) -> bool:
    """Tell whether a value is a letter or a product of letters: possibly a multiple-choice letter or a name."""
    match value.expression:
        case Call("*", factors):
            pass
        case factor:
            factors = (factor,)
    return all(isinstance(factor, Symbol) and factor.name.isalpha() for factor in factors)


def sort_by_size(items: Sequence[Value]) -> list[Value] | None:
    """Return real numbers sorted by size; None if an item is not a real number."""
    keyed: list[tuple[float, int]] = []
    for at, item in enumerate(items):
        if not isinstance(item, Scalar) or item.suffix or (value := numeric.to_float(item.expression)) is None:
            return None
        keyed.append((value, at))
    return [items[at] for _, at in sorted(keyed)]


def subtract_sides(relation: Relation) -> tuple[str, Expression] | None:
    """Return a relation as (sign, left − right), `>` and `≥` turned around; None if it is none of two scalars."""
    match sets.turn_upwards(relation):
        case Relation((sign,), (Scalar(left, ""), Scalar(right, ""))):
            builder = Builder()
            return sign, builder.add((left, builder.negate(right)))
        case _:
            return None
