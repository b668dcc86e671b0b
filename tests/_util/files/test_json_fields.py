"""A field of a foreign file has the expected type, or counts as missing."""

from __future__ import annotations

import pytest

from rlkit._util.files.json_fields import pick, pick_list, pick_numbers, pick_object, pick_rows

ROW: dict[str, object] = {
    "name": "a",
    "size": 3,
    "nested": {"deep": {"x": 1.5}},
    "rows": [{"n": 1}, 2, {"n": 3}],
    "numbers": {"one": 1, "half": 0.5, "is": True, "text": "2", "none": None, "nan": float("nan"), "huge": 10**400},
}


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("name", str, "a"),
        ("name", int, None),
        ("size", int, 3),
        ("size", str, "3"),
        ("size", float, 3.0),
        ("nested.deep.x", float, 1.5),
        ("nested.deep.x", int, None),
        ("nested.none.x", float, None),
        ("name.deep", str, None),
        ("numbers.is", float, None),
        ("numbers.nan", float, None),
        ("numbers.huge", float, None),
    ],
)
def test_a_field_of_another_type_counts_as_missing(name: str, kind: type[object], value: object) -> None:
    assert pick(ROW, name, kind) == value


def test_an_empty_name_is_the_value_itself() -> None:
    assert pick(3, "", float) == 3.0
    assert pick([], "", dict) is None


def test_what_is_no_object_or_list_is_empty() -> None:
    assert pick_object(ROW, "nested") == {"deep": {"x": 1.5}}
    assert (pick_object(ROW, "name"), pick_list(ROW, "size"), pick_rows(None, "x")) == ({}, [], [])
    assert pick_rows(ROW, "rows") == [{"n": 1}, {"n": 3}]
    assert pick_list(ROW, "nested") == [{"x": 1.5}]  # the values of an object, too
    assert pick_numbers(ROW, "numbers") == {"one": 1.0, "half": 0.5}
