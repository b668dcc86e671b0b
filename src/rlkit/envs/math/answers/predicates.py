"""Values seen as another type: as a set, as a list in order, as the difference of two sides, as words.

Invariant: nothing is compared here; what a value cannot be seen as is None or False.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.envs.math.answers import numeric, sets
from rlkit.envs.math.answers.nodes import Builder, Expression, Product, Symbol
from rlkit.envs.math.answers.relations import flipped, labelled
from rlkit.envs.math.answers.values import Group, Interval, Relation, Scalar, Text, Union, Value

_COORDINATES = frozenset("xyz")


def is_set(value: Value) -> bool:
    """Whether it is a set of real numbers, also one that an inequality describes."""
    return isinstance(value, Interval | Union) or (isinstance(value, Relation) and sets.variable(value) is not None)


def is_unsolved(value: Value) -> bool:
    """Whether it is an inequality of one variable whose solutions may be any set, and are not known here: `|x|<1`."""
    if not isinstance(value, Relation) or "=" in value.signs or sets.solutions(value) is not None:
        return False
    names = [numeric.variables(side.expression) for side in value.sides if isinstance(side, Scalar)]
    return len(names) == len(value.sides) and sum(map(len, names)) == 1


def is_collection(value: Value) -> bool:
    """Whether it may hold several, so that a set of it is another thing."""
    return is_set(value) or (isinstance(value, Group) and value.kind not in ("tuple", "square"))


def named_value(relation: Relation) -> Value | None:
    """The value of an equation whose other side may be what was asked for: `|z|=5`, `m+n=33`."""
    if relation.signs != ("=",) or labelled(relation) is not None:
        return None
    first, last = relation.sides
    several = isinstance(first, Scalar) and len(numeric.variables(first.expression)) > 1
    if not (relation.named or several) or not isinstance(last, Scalar) or numeric.variables(last.expression):
        return None
    return last


def lists_braces(group: Group) -> bool:
    """Tell whether it is a bare list with an item in braces that may be TeX's own."""
    return group.kind == "list" and any(isinstance(item, Group) and item.kind == "braces" for item in group.items)


def has_labels(group: Group) -> bool:
    """Whether it is a bare list each of whose items has its name: `x=1, y=2`."""
    return group.kind == "list" and all(labelled(item) is not None for item in group.items)


def by_coordinate(group: Group) -> Sequence[Value]:
    """The items, those of `y=1, x=2` in the order of the coordinates."""
    names = [found.label for item in group.items if (found := labelled(item)) is not None]
    if group.kind != "list" or len(names) < len(group.items) or not set(names) <= _COORDINATES:
        return group.items
    return [item for _, item in sorted(zip(names, group.items, strict=True), key=lambda named: named[0])]


def raw_text(value: Value) -> str:
    """Its words; none for what has no words."""
    return value.raw if isinstance(value, Text | Scalar) else ""


def is_letters(value: Scalar) -> bool:
    """A letter, or several, that may stand for themselves: a choice, a name."""
    factors = value.expression.factors if isinstance(value.expression, Product) else (value.expression,)
    return all(isinstance(factor, Symbol) and factor.name.isalpha() for factor in factors)


def in_order(items: Sequence[Value]) -> list[Value] | None:
    """Real numbers by size; None where one of the items is none."""
    keyed: list[tuple[float, int]] = []
    for at, item in enumerate(items):
        if not isinstance(item, Scalar) or item.suffix or (value := numeric.real(item.expression)) is None:
            return None
        keyed.append((value, at))
    return [items[at] for _, at in sorted(keyed)]


def difference(relation: Relation) -> tuple[str, Expression] | None:
    """The sign, `=`, `≠`, `<` or `≤`, and the left side minus the right one; None for a chain, or other sides."""
    if relation.signs[0] in (">", "≥"):
        relation = flipped(relation)
    match relation:
        case Relation((sign,), (Scalar(left, ""), Scalar(right, ""))):
            builder = Builder()
            return sign, builder.add((left, builder.negate(right)))
        case _:
            return None
