"""What a user's code hands over, as text and JSON that any file can hold.

Invariant: what comes out of here can be written as UTF-8 and as strict JSON, and nothing but an `Unwritable` is raised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import cast

import numpy as np

from rlkit.types import Json

_INTEGER_BITS = 64
_SHOWN_CHARS = 60


class Unwritable(ValueError):
    """A value that JSON cannot hold, not even as its text; says why."""


def readable(text: str) -> str:
    r"""The text with each lone surrogate, which UTF-8 cannot hold, as its escape: `\udcff`."""
    return text.encode(errors="backslashreplace").decode()


def text_of(value: object) -> str:
    """`str(value)`, or what that raised."""
    try:
        return readable(str(value))
    except Exception as error:  # the value is the user's own, and so is its `str`
        return f"<a {type(value).__name__} whose text cannot be had: {type(error).__name__}>"


def shown(value: object) -> str:
    """A value in a message: its type, and the beginning of its `repr`."""
    try:
        text = readable(repr(value))
    except Exception as error:  # likewise its `repr`
        return f"{type(value).__name__} whose repr raises {type(error).__name__}"
    return f"{type(value).__name__} {text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + '...'}"


def plain(value: object) -> Json:
    """A value as JSON that shares nothing with it; what JSON does not have is its `repr`.

    Raises:
        Unwritable: a key of a mapping is no text, the value holds itself, or a `repr` raises.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise Unwritable("it holds itself, or is nested too deeply") from None


def _plain(given: object) -> Json:
    value = cast("object", given.item()) if isinstance(given, np.generic) else given
    match value:
        case str():
            return readable(str.__str__(value))
        case None | int() | float() if _fits(value):
            return value
        case Mapping():
            entries = cast("Mapping[object, object]", value)
            return {_key(key): _plain(child) for key, child in entries.items()}
        case list() | tuple():
            return [_plain(child) for child in cast("list[object]", value)]
        case _:
            return _repr(value)


def _fits(number: float | None) -> bool:
    """Whether any reader of JSON knows the number."""
    match number:
        case None:
            return True
        case int():
            return number.bit_length() <= _INTEGER_BITS
        case _:
            return math.isfinite(number)


def _repr(value: object) -> str:
    try:
        return readable(repr(value))
    except RecursionError:
        raise
    except Exception as error:  # likewise
        raise Unwritable(f"it holds a {shown(value)}") from error


def _key(key: object) -> str:
    if isinstance(key, str):
        return readable(str.__str__(key))
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    raise Unwritable(f"it has the key {shown(key)}, which is no text")
