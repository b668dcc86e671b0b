from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.config.loading.nodes import Node, find, plain
from rlkit.config.loading.yaml_text import parse, read_file
from rlkit.errors import ConfigError
from tests.config.conftest import Refused
from tests.config.strategies import json_values


def parse_text(text: str) -> Node:
    node = parse(text, source="a.yaml")
    assert node is not None
    return node


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-2.5E+3", -2500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("007", 7),
        ("0x1F", 31),
        ("0o17", 15),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("on", "on"),
        ("yes", "yes"),
        ("NO", "NO"),
        ("true", True),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("!!str 12", "12"),
        ("&x !!str 12", "12"),
        ('"\\ud83d\\ude00"', "😀"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    parsed = plain(parse_text(f"key: {text}"))["key"]  # type: ignore[index]
    assert parsed == value
    assert type(parsed) is type(value)


def test_keys_are_always_strings() -> None:
    assert plain(parse_text("1: a\nnull: b\ntrue: c")) == {"1": "a", "null": "b", "true": "c"}


@given(json_values())
def test_json_is_parsed_unchanged(value: object) -> None:
    assert plain(parse_text(json.dumps(value))) == value


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_rejected_with_one_line(text: str) -> None:
    try:
        parse(text, source="a.yaml")
    except ConfigError as error:
        assert "\n" not in str(error)


def test_values_have_the_lines_of_their_keys_and_items_their_own() -> None:
    root = parse_text("a:\n  b:\n    1\n  c:\n    - x\n    - y\n")
    lines = {path: find(root, path) for path in [("a",), ("a", "b"), ("a", "c"), ("a", "c", 1)]}
    assert [node and node.origin.line for node in lines.values()] == [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "a.yaml:2: 'a' is a duplicate key, first at a.yaml:1"),
        ("x:\n  a: 1\n  'a': 2", "a.yaml:3: 'a' is a duplicate key, first at a.yaml:2"),
        ("a: b: c", "a.yaml:1: not valid YAML: a second ': ' in one line"),
        ("a:\n\tb: 1", "a.yaml:2: not valid YAML: a tab"),
        ("{a} b", "a.yaml:1: not valid YAML: text after the end of a value: put the whole value in quotes"),
        ("a: 1\n---\nb: 2", "several documents"),
        ("a: !!python/object:os.system x", "the tag !!python/object:os.system is not supported"),
        ("a: !!int x", "the tag !!int"),
        ("? [a]\n: 1", "a list or mapping cannot be a key"),
        ("<<: {a: 1}", "merge keys (<<) are not supported"),
        ("a: &x {b: *x}", "nested too deeply"),
        ("a: *x", "undefined alias"),
        ("[" * 5000, "nested too deeply"),
        ("[" * 150 + "]" * 150, "nested too deeply"),
        ("a: .inf", ".inf is not a finite number"),
        ("a: -.INF", "is not a finite number"),
        ("a: .nan", ".nan is not a finite number"),
        ("a: 1e999", "1e999 is too large a number"),
        ("a: " + "9" * 5000, "is too long a number"),
        ('a: "\\ud800"', "a lone surrogate"),
        ("a: [1, 2", "not valid YAML: expected ',' or ']', but got the end of the text"),
        ("a: @b", "put the value in quotes"),
        ("a\n\0", "a.yaml:2: not a text file: it contains the character U+0000"),
    ],
)
def test_unsupported_yaml_is_an_error_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, source="a.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_exploding_aliases_are_an_error() -> None:
    levels = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="too many values"):
        parse("\n".join(levels), source="a.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.yaml: is empty"),
        (b"# nothing\n", "a.yaml: is empty"),
        (b"\n- a\n", "a.yaml:2: a configuration is a mapping"),
        (b"hello", "a.yaml:1: a configuration is a mapping"),
        (b"null", "a.yaml:1: a configuration is a mapping"),
        (b"\xff\xfe\x00", "a.yaml: is not UTF-8 text"),
        (b"\x7fELF\x00\x01", "a.yaml:1: not a text file"),
        (b"a: " + b"x" * 200_001, "a.yaml: is larger than 200 kB"),
    ],
)
def test_file_without_a_configuration_is_an_error(refused: Refused, content: bytes, message: str) -> None:
    assert message in refused(content)


def test_a_byte_order_mark_is_ignored(folder: Path) -> None:
    (folder / "a.yaml").write_bytes(b"\xef\xbb\xbfa: 1")
    assert plain(read_file(Path("a.yaml"))) == {"a": 1}


def test_missing_file_suggests_the_nearest_one(folder: Path) -> None:
    (folder / "train.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"trian\.yaml: no such file\. Did you mean 'train\.yaml'"):
        read_file(Path("trian.yaml"))
    with pytest.raises(ConfigError, match="There is no folder gone either"):
        read_file(Path("gone/train.yaml"))
    with pytest.raises(ConfigError, match="is a directory"):
        read_file(folder)
