"""Phrases for messages about a user's own estimator or loss: its error, or the value that it returned."""

from __future__ import annotations

import inspect
import traceback

from rlkit._util.json_values import safe_str


def describe_error(error: BaseException) -> str:
    """Return an error and its place, such as `KeyError: 'mine' at file:line`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {safe_str(error)}{place}"


def describe_value(value: object) -> str:
    """Return a phrase for a value of the wrong type; a coroutine is closed."""
    if inspect.iscoroutine(value):
        value.close()
        return "a coroutine, as it is an async function"
    return "None" if value is None else f"a value of type {type(value).__name__}"
