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
def test_numbers_in_words_are_read(text: str, value: int | None) -> None:
    assert words.number(text) == value


def test_a_unit_has_many_names() -> None:
    assert words.unit("hrs") == words.unit("hours") == words.unit("h") == words.unit("Hour")
    assert words.unit("square inches") == words.unit("inches", 2) != words.unit("inches")
    assert words.unit("miles per hour") == words.unit("mph")
    assert words.unit("apples") is None
