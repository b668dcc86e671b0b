"""Fields of JSON that another program wrote.

Invariant: a field that is missing, or of another type than the reader expects, counts as None or as empty.
"""

from __future__ import annotations

import sys
from typing import Any, cast


def pick[T](row: object, name: str, kind: type[T]) -> T | None:
    """Return a field of nested objects; an integer counts as text, too, and a finite one as a float.

    Args:
        name: names of objects and field, separated by dots; empty for `row` itself.
    """
    value: Any = row
    for part in name.split(".") if name else ():
        value = cast("dict[str, Any]", value).get(part) if isinstance(value, dict) else None
    if type(value) in (int, float) and kind in (str, float):
        value = str(value) if kind is str else float(value) if abs(value) <= sys.float_info.max else None
    return cast("T | None", value if isinstance(value, kind) else None)


def pick_object(row: object, name: str) -> dict[str, Any]:
    """Return an object; empty if it is missing."""
    return cast("dict[str, Any]", pick(row, name, dict) or {})


def pick_list(row: object, name: str) -> list[Any]:
    """Return a list, or the values of an object; empty if it is missing."""
    return cast("list[Any]", pick(row, name, list) or list(pick_object(row, name).values()))


def pick_rows(row: object, name: str) -> list[dict[str, Any]]:
    """Return the objects of a list, or of the values of an object."""
    return [each for each in pick_list(row, name) if isinstance(each, dict)]


def pick_numbers(row: object, name: str) -> dict[str, float]:
    """Return the finite numbers of an object."""
    numbers = {key: pick(value, "", float) for key, value in pick_object(row, name).items()}
    return {key: number for key, number in numbers.items() if number is not None}
