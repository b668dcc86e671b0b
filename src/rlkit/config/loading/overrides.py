"""Overrides of single values on the command line: `sampling.stop=[a, b]`.

Invariant: an override changes only the value at its path, and its value means the same as in a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from rlkit.config.loading.nodes import KeyPath, Node, Origin, dotted, merge
from rlkit.config.loading.outline import locate
from rlkit.config.loading.secrets import redact
from rlkit.config.loading.yaml_text import DEEPEST_NESTING, parse
from rlkit.errors import ConfigError, did_you_mean

_INDEX = re.compile(r"[0-9]{1,6}")
COMMAND_LINE = Origin("command line")

_SHORT_FORMS: Mapping[str | int, str] = {"advantage": "name", "workers": "count"}
"""Sections that can be a scalar, with the field that it sets."""

_SEGMENT = re.compile(r"""\s*(?:("(?:[^"\\]|\\.)*")|'([^']*)'|([^"'.=\s][^.=]*?))\s*([.=])""", re.DOTALL)


def apply(root: Node, override: str) -> Node:
    """Return the configuration with one value set by `path=value`.

    A path joins keys and list indices by dots; quote a key that contains a dot. The value is YAML. A non-empty
    mapping is merged into the earlier value. Any other value replaces the earlier value. Null removes the key.

    Raises:
        ConfigError: the override is not of the form `path=value`, or its path goes through a scalar.
    """
    keys, text = split(override)
    if re.fullmatch(r"\s*>.+", text):  # a condition, such as >= 1; in YAML it would begin a block of several lines
        text = json.dumps(text.strip())
    try:
        value = parse(text, source=COMMAND_LINE.source, lines=False) or Node(None, COMMAND_LINE)
    except ConfigError as error:
        problem = str(error).removeprefix(f"{COMMAND_LINE}: ")
        raise ConfigError(f"{COMMAND_LINE}: {dotted(keys)}: {problem}") from None
    return _set(root, keys, value, parents=())


def split(override: str) -> tuple[tuple[str, ...], str]:
    """Return the key path and the text of the value; ConfigError if the form is not `path=value`."""
    keys, position = list[str](), 0
    while segment := _SEGMENT.match(override, position):
        double, single, bare, end = segment.groups()
        keys.append(_parse_quoted_key(double) if double is not None else single if single is not None else bare)
        position = segment.end()
        if end == "=":
            return tuple(keys), override[position:]
        if len(keys) > DEEPEST_NESTING:
            break
    form = "path=value, for instance sampling.max_tokens=64"
    raise ConfigError(f"{COMMAND_LINE}: {_shorten(override)!r} is not of the form {form}")


def _parse_quoted_key(text: str) -> str:
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"command line: the key {_shorten(text)} is not a valid JSON string") from None


def _shorten(override: str) -> str:
    text = redact(override)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _set(node: Node, keys: tuple[str, ...], value: Node, *, parents: KeyPath) -> Node:
    if not keys:
        return merge(node, value)
    key, rest = keys[0], keys[1:]
    content = node.value
    if content is None:
        shape = locate((*parents, key))[1]
        is_item = _index(key) is not None and shape is not None and shape.items is not None
        content = list[Node]() if is_item else dict[str, Node]()
    if isinstance(content, list):
        return Node(_set_item(content, key, rest, value, parents=parents), node.origin)
    if not isinstance(content, dict):
        field, section = _SHORT_FORMS.get(parents[-1]), dotted(parents)
        form = field and f": write {section}={{{field}: {redact(str(content))}, {dotted(keys)}: …}}"
        problem = f"{section} is a scalar (from {node.origin}), so it has no fields{form or ''}"
        raise ConfigError(f"{COMMAND_LINE}: {dotted((*parents, *keys))}: {problem}")
    if not rest:
        shape = locate((*parents, key))[1] if value.value is None and key not in content else None
        if shape is not None and shape.entries is not None and shape.entries.is_mapping:  # such as `envs`
            near, place = did_you_mean(key, content), dotted((*parents, key))
            fix = f"Use {place}={{}} to add it with default settings"
            raise ConfigError(f"{COMMAND_LINE}: {place}: there is no such section to remove.{near} {fix}")
        return merge(Node(content, node.origin), Node({key: value}, node.origin))
    child = content.get(key, Node(None, COMMAND_LINE))
    return Node({**content, key: _set(child, rest, value, parents=(*parents, key))}, node.origin)


def _set_item(items: list[Node], key: str, rest: tuple[str, ...], value: Node, *, parents: KeyPath) -> list[Node]:
    if (index := _index(key)) is None or index > len(items):
        indices = f"from 0 to {len(items)}; {len(items)} appends" if items else "0, because the list is empty"
        problem = f"{dotted(parents)} is a list: use an index {indices}"
        raise ConfigError(f"{COMMAND_LINE}: {dotted((*parents, key, *rest))}: {problem}")
    old = items[index] if index < len(items) else Node(None, COMMAND_LINE)
    return [*items[:index], _set(old, rest, value, parents=(*parents, index)), *items[index + 1 :]]


def _index(key: str) -> int | None:
    return int(key) if _INDEX.fullmatch(key) else None
