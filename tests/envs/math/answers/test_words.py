from __future__ import annotations

import pytest

from rlkit.envs.math.answers.lexing import words


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("eighteen", 18),
        ("forty-two", 42),
        ("two hundred and five", 205),
        ("Three million, ", None),
        ("one million two thousand", 1_002_000),
        ("and", None),
        ("not seven", None),
        ("", None),
    ],
)
def test_numbers_in_words_are_parsed(text: str, value: int | None) -> None:
    assert words.parse_number(text) == value


def test_a_unit_has_many_names() -> None:
    assert words.parse_unit("hrs") == words.parse_unit("hours") == words.parse_unit("h") == words.parse_unit("Hour")
    assert words.parse_unit("square inches") == words.parse_unit("inches", 2) != words.parse_unit("inches")
    assert words.parse_unit("miles per hour") == words.parse_unit("mph")
    assert words.parse_unit("apples") is None
