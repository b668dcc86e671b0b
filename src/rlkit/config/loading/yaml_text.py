"""Parse YAML 1.2 (core schema) to nodes with line numbers.

Invariant: a document has the same values as in every YAML 1.2 reader, or is rejected. Duplicate keys, several
documents, tags and non-finite numbers are errors. `on`, `yes` and `1:30` are strings, and `1e-4` is a number.
"""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import cast

import yaml
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

from rlkit.config.loading.nodes import Node, Origin, Scalar
from rlkit.errors import ConfigError

LARGEST_FILE_BYTES = 200_000
NODES_MAX = 100_000  # limit for aliases, with which a short document can expand exponentially
DEEPEST_NESTING = 100

EXAMPLE = "for instance `envs: {arithmetic: {}}`"

_INTEGER = re.compile(r"[-+]?[0-9]+")
_RADIX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_PLAIN_TAG = "rlkit:plain"
_STRING_TAG = "tag:yaml.org,2002:str"
_CONTAINER_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


class _Loader(yaml.BaseLoader):
    """PyYAML's loader without its YAML 1.1 interpretation of plain scalars."""

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: tuple[bool, bool] | bool) -> str:
        """Return the tag of a node; plain scalars get a tag of their own, unlike quoted or `!!str` scalars."""
        if kind is yaml.ScalarNode and isinstance(implicit, tuple) and implicit[0]:
            return _PLAIN_TAG
        return cast("str", super().resolve(kind, value, implicit))


def read_file(path: Path) -> Node:
    """Read a configuration file; ConfigError if it does not exist, is not YAML 1.2, or is not a mapping."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except FileNotFoundError:
        near = _suggest_file(path)
        fix = near or " Name a YAML file (`rlkit init DIR` makes one), or write a setting as key=value, as in steps=20"
        raise ConfigError(f"{path}: no such file.{fix}") from None
    except IsADirectoryError:
        names = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".yaml", ".yml"))
        hint = f" Did you mean '{path / names[0]}'?" if names else ""
        raise ConfigError(f"{path}: is a directory; a configuration is a YAML file.{hint}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > LARGEST_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {LARGEST_FILE_BYTES // 1000} kB; check that it is a configuration")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; a configuration is a YAML file") from None
    root = parse(text, source=str(path), folder=path.absolute().parent)
    if root is None or (root.value is None and not text.strip().strip("-~")):  # no text, `---` or `~`
        raise ConfigError(f"{path}: is empty: write a mapping, {EXAMPLE}")
    if not isinstance(root.value, dict):
        raise ConfigError(f"{root.origin}: a configuration is a mapping of fields to values, {EXAMPLE}")
    return root


def parse(text: str, *, source: str, folder: Path | None = None, lines: bool = True) -> Node | None:
    """Parse one YAML document; return None if it is empty. ConfigError if it is not YAML 1.2.

    Args:
        source: name of the document, for messages and origins.
        folder: base folder of relative paths in the document.
        lines: record line numbers.
    """
    builder = _Builder(source, folder, lines=lines)
    try:
        node: yaml.Node | None = _Loader(text).get_single_node()
        return None if node is None else builder.build(node)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = builder.origin(mark) if mark else source
        raise ConfigError(f"{where}: not valid YAML: {_problem(error)}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        where = Origin(source, line if lines else None)
        raise ConfigError(f"{where}: not a text file: it contains the character U+{error.character:04X}") from None
    except RecursionError:
        raise ConfigError(f"{source}: is nested too deeply") from None


def scalar(text: str) -> Scalar:
    """Return the value of a plain scalar; ValueError if a number is not finite or too long."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _RADIX.fullmatch(text):
        return int(text, 0)
    if _NOT_FINITE.fullmatch(text):
        raise ValueError("is not a finite number")
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise ValueError("is too large a number")
        return number
    return text


class _Builder:
    """Convert PyYAML's graph to nodes, and reject values that JSON does not support."""

    def __init__(self, source: str, folder: Path | None, *, lines: bool) -> None:
        self._source, self._folder, self._lines = source, folder, lines
        self._count = 0

    def origin(self, mark: yaml.Mark) -> Origin:
        return Origin(self._source, mark.line + 1 if self._lines else None, self._folder)

    def build(self, node: yaml.Node, origin: Origin | None = None, depth: int = 0) -> Node:
        origin = origin or self.origin(node.start_mark)
        self._count += 1
        if self._count > NODES_MAX or depth > DEEPEST_NESTING:
            raise ConfigError(f"{origin}: is nested too deeply or has too many values")
        if isinstance(node, yaml.ScalarNode):
            return Node(self._scalar(node, origin), origin)
        if node.tag not in _CONTAINER_TAGS:
            raise _make_tag_error(node.tag, origin)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.build(item, depth=depth + 1) for item in node.value], origin)
        assert isinstance(node, yaml.MappingNode)
        entries = dict[str, Node]()
        for key_node, value_node in node.value:
            key, place = self._key(key_node), self.origin(key_node.start_mark)
            if key in entries:
                raise ConfigError(f"{place}: {key!r} is a duplicate key, first at {entries[key].origin}")
            entries[key] = self.build(value_node, place, depth + 1)
        return Node(entries, origin)

    def _key(self, node: yaml.Node) -> str:
        place = self.origin(node.start_mark)
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{place}: a list or mapping cannot be a key; quote text that begins with [ or {{")
        if node.value == "<<" and node.style is None:
            raise ConfigError(f"{place}: merge keys (<<) are not supported: use several configuration files instead")
        return self._text(node.value, place)

    def _scalar(self, node: yaml.ScalarNode, origin: Origin) -> Scalar:
        text = self._text(node.value, origin)
        if node.tag == _STRING_TAG:
            return text
        if node.tag != _PLAIN_TAG:
            raise _make_tag_error(node.tag, origin)
        try:
            return scalar(text)
        except ValueError as error:
            problem = str(error) if str(error).startswith("is ") else "is too long a number"
            raise ConfigError(f"{origin}: {text[:20]} {problem}") from None

    def _text(self, text: str, place: Origin) -> str:
        try:
            # JSON escapes characters above U+FFFF as a surrogate pair, which PyYAML does not combine.
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise ConfigError(f"{place}: contains a lone surrogate (half of a character)") from None


def _make_tag_error(tag: str, place: Origin) -> ConfigError:
    return ConfigError(f"{place}: the tag {tag.replace('tag:yaml.org,2002:', '!!')} is not supported: remove it")


def _problem(error: MarkedYAMLError) -> str:
    if error.context and "expected a single document" in error.context:
        return "it contains several documents: remove the `---` or split the file"
    problem = error.problem or "it cannot be parsed"
    if "mapping values are not allowed" in problem:
        return "a second ': ' in one line: put the value in quotes"
    if "'\\t'" in problem:
        return "a tab in place of spaces"
    if "'<document start>'" in problem:
        return "text after the end of a value: put the whole value in quotes"
    if "cannot start any token" in problem:
        return f"{problem}: put the value in quotes"
    return problem.replace("'<stream end>'", "the end of the text")


def _suggest_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return f" There is no folder {path.parent} either"
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean '{path.parent / near[0]}'?" if near else ""
