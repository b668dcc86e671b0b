"""Convert values of a user's code to text and JSON.

Invariant: every result can be written as UTF-8 and as strict JSON, and only `NotJson` is raised. The work is bounded by
the budget, not by the size of the value.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import cast

import numpy as np

from rlkit.types import Json

_INTEGER_BITS = 64
_SHOWN_CHARS = 60
_SHOWN_ITEMS = 1000
_TEXT_CHARS = 10_000
_COLLECTIONS = (list, tuple, dict, set, frozenset)
_QUOTES_BYTES = 2
_CHILD_BYTES = 2  # a digit and a comma
_ENTRY_BYTES = 5  # an empty key, a colon, a digit and a comma
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class NotJson(ValueError):
    """A value that cannot be converted to JSON, not even by its `repr`."""


class TooLarge(NotJson):
    """A value larger than its budget."""


class JsonBudget:
    """Limit in bytes of the JSON of one or more values.

    A lower bound of the size is counted during the conversion, so that a far too large value is rejected early.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes

    def take(self, count: int) -> None:
        """Use up bytes; raise `TooLarge` if fewer are left."""
        self._left -= count
        if self._left < 0:
            raise TooLarge("it is too large")

    def check(self, count: int) -> None:
        """Raise `TooLarge` if fewer bytes are left."""
        if count > self._left:
            raise TooLarge("it is too large")


def json_bytes(value: Json) -> int:
    """Return the size of a plain value as recorded JSON, in bytes."""
    return len(_ENCODER.encode(value))  # of ASCII


def escape_surrogates(text: str) -> str:
    r"""Replace each lone surrogate, which UTF-8 cannot encode, by its escape: `\udcff`."""
    return text.encode(errors="backslashreplace").decode()


def safe_str(value: object) -> str:
    """Return `str(value)`, shortened in the middle if very long; never raise."""
    try:
        text = str(value)
        if len(text) > _TEXT_CHARS:
            half = _TEXT_CHARS // 2
            text = f"{text[:half]} … ({len(text):,} characters) … {text[-half:]}"
        return escape_surrogates(text)
    except Exception as error:  # from the user's `__str__`
        return f"<a {type(value).__name__} whose str() raises {type(error).__name__}>"


def render_value(value: object) -> str:
    """Return the type of a value and the beginning of its `repr`, for a message."""
    kind = type(value).__name__
    if isinstance(value, _COLLECTIONS) and (count := len(cast("Sized", value))) > _SHOWN_ITEMS:
        return f"{kind} of {count:,} items"
    start = value[:_SHOWN_ITEMS] if isinstance(value, str | bytes) else cast("object", value)
    try:
        text = escape_surrogates(repr(start))
    except Exception as error:  # from the user's `__repr__`
        return f"{kind} whose repr raises {type(error).__name__}"
    return f"{kind} {text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + '...'}"


def describe_type(value: object) -> str:
    """Return a phrase for a value of the wrong type; a coroutine is closed."""
    if inspect.iscoroutine(value):
        value.close()
        return "a coroutine, as it is an async function"
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def map_text(value: Json, change: Callable[[str], str], *, keys: bool = False) -> Json:
    """Apply `change` to every string in a value, and with `keys` also to keys of mappings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if keys else key: map_text(child, change, keys=keys) for key, child in value.items()}
    if isinstance(value, Sequence):
        return [map_text(child, change, keys=keys) for child in value]
    return value


def redact_object(value: Mapping[str, Json], redact: Callable[[str], str]) -> Mapping[str, Json]:
    """Apply `redact` to every string and key in an object; return the object itself if it contains no secret.

    An object without a secret is the usual case, and redacting one long text is faster than many short ones.
    """
    texts = list[str]()

    def collect(text: str) -> str:
        texts.append(text)
        return text

    map_text(value, collect, keys=True)
    text = "\n".join(texts)
    return value if redact(text) == text else cast("Mapping[str, Json]", map_text(value, redact, keys=True))


def to_json(value: object, budget: JsonBudget | None = None) -> Json:
    """Convert a value to JSON, as a deep copy; types that JSON does not support become their `repr`.

    Args:
        budget: limit in bytes; None for no limit.

    Raises:
        TooLarge: the value exceeds the budget.
        NotJson: a key of a mapping is not a string, the value contains itself, or a `repr` raises.
    """
    try:
        return _to_json(value, budget or JsonBudget(sys.maxsize))
    except RecursionError:
        raise NotJson("it contains itself, or is nested too deeply") from None


def _to_json(value: object, budget: JsonBudget) -> Json:
    if isinstance(value, np.generic):
        value = cast("object", value.item())
    match value:
        case str():
            return _text(str.__str__(value), budget)
        case None | int() | float() if _fits(value):
            budget.take(1)
            return value
        case Mapping():
            entries = cast("Mapping[object, object]", value)
            budget.check(_ENTRY_BYTES * len(entries))
            return {_key(key, budget): _to_json(child, budget) for key, child in entries.items()}
        case list() | tuple():
            children = cast("list[object]", value)
            budget.check(_CHILD_BYTES * len(children))
            budget.take(len(children))  # the commas
            return [_to_json(child, budget) for child in children]
        case _:
            if isinstance(value, (bytes, bytearray, *_COLLECTIONS)):
                budget.check(len(cast("Sized", value)))  # its `repr` is longer
            return _repr(cast("object", value), budget)


def _text(text: str, budget: JsonBudget) -> str:
    budget.take(len(text) + _QUOTES_BYTES)
    return escape_surrogates(text)


def _fits(number: float | None) -> bool:
    """Return whether every JSON reader supports the number."""
    if isinstance(number, int):
        return number.bit_length() <= _INTEGER_BITS
    return number is None or math.isfinite(number)


def _repr(value: object, budget: JsonBudget) -> str:
    try:
        return _text(repr(value), budget)
    except (RecursionError, TooLarge):
        raise
    except Exception as error:  # from the user's `__repr__`
        raise NotJson(f"it contains a {render_value(value)}") from error


def _key(key: object, budget: JsonBudget) -> str:
    budget.take(2)  # the colon and the comma
    if isinstance(key, str):
        return _text(str.__str__(key), budget)
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    raise NotJson(f"it has the key {render_value(key)}, which is not a string")
