from __future__ import annotations

import json
import math
from enum import IntEnum, StrEnum
from pathlib import PurePosixPath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit._util.json_values import NotJson, escape_surrogates, render_value, safe_str, to_json


class Colour(StrEnum):
    RED = "red"


class Number(IntEnum):
    ONE = 1


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": [1, (2, None)], 3: True}, {"a": [1, [2, None]], "3": True}),
        ({None: 1, True: 2, 0.5: 3}, {"null": 1, "true": 2, "0.5": 3}),
        (np.float32(1.5), 1.5),
        (np.int64(3), 3),
        (math.nan, "nan"),
        (10**30, str(10**30)),
        (PurePosixPath("a"), "PurePosixPath('a')"),
        ("b\udcff", "b\\udcff"),
        ({"b\udcff": Colour.RED}, {"b\\udcff": "red"}),
        (Number.ONE, 1),
    ],
    ids=str,
)
def test_values_that_json_lacks_are_written_as_text(value: object, expected: object) -> None:
    assert to_json(value) == expected
    json.dumps(to_json(value), allow_nan=False).encode()


def test_the_error_on_an_unwritable_value_names_the_reason() -> None:
    circle: list[object] = []
    circle.append({"again": circle})
    with pytest.raises(NotJson, match="it contains itself"):
        to_json(circle)
    with pytest.raises(NotJson, match=r"it has the key tuple \('a', 1\), which is not a string"):
        to_json({("a", 1): 2})
    with pytest.raises(NotJson, match="it contains a Mute whose repr raises RuntimeError"):
        to_json([Mute()])
    with pytest.raises(NotJson):
        to_json(1 << 100_000)  # Python refuses to write it in digits


def test_any_value_can_be_rendered() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert render_value("x" * 100) == "str " + repr("x" * 100)[:57] + "..."
    assert render_value(Mute()) == "Mute whose repr raises RuntimeError"
    assert safe_str(Silent()) == "<a Silent whose str() raises ValueError>"


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_can_be_written_and_valid_text_is_unchanged(text: str) -> None:
    escape_surrogates(text).encode()
    if not any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        assert escape_surrogates(text) == text
