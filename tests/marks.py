"""Marks of tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def split_slow[Value](values: Iterable[Value], is_quick: Callable[[Value], bool]) -> list[Any]:
    """Return parameters of which the test command plays the quick ones, and `-m slow` the others; a tuple is a set."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if is_quick(value) else pytest.mark.slow
        )
        for value in values
    ]
