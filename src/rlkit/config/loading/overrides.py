"""Single values set from the command line: `sampling.stop=[a, b]`.

Invariant: an override changes only the value at its path; its value has the same meaning as in a file.
"""

from __future__ import annotations

import json
import re

from rlkit.config.loading.nodes import Node, Origin, Steps, dotted, is_list, is_mapping, merge
from rlkit.config.loading.outline import find_shape
from rlkit.config.loading.secrets import redact
from rlkit.config.loading.yaml_text import DEEPEST_NESTING, parse
from rlkit.errors import ConfigError, did_you_mean

_INDEX = re.compile(r"[0-9]{1,6}")
COMMAND_LINE = Origin("command line")

_SEGMENT = re.compile(r"""\s*(?:("(?:[^"\\]|\\.)*")|'([^']*)'|([^"'.=\s][^.=]*?))\s*([.=])""", re.DOTALL)


def apply(root: Node, override: str) -> Node:
    """Return the configuration with one value set by `path=value`.

    A path is keys and list indices with dots between; a key that contains a dot is quoted. The value is YAML; a mapping
    is merged into the earlier value, anything else replaces it, `{}` included. Null removes it.

    Raises:
        ConfigError: the override has another form, or its path leads through a scalar.
    """
    steps, text = split(override)
    return _set(root, steps, _value(text, dotted(steps)), parents=())


def split(override: str) -> tuple[tuple[str, ...], str]:
    """Return the path and the text of the value; ConfigError if it is not of the form `path=value`."""
    steps, position = list[str](), 0
    while segment := _SEGMENT.match(override, position):
        double, single, bare, end = segment.groups()
        steps.append(_unquoted(double) if double is not None else single if single is not None else bare)
        position = segment.end()
        if end == "=":
            return tuple(steps), override[position:]
        if len(steps) > DEEPEST_NESTING:
            break
    raise ConfigError(
        f"command line: {_shorten(override)!r} is not of the form path=value, for instance sampling.max_tokens=64"
    )


def _unquoted(text: str) -> str:
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(
            f"command line: {_shorten(text)} is not a string in double quotes as JSON writes it"
        ) from None


def _shorten(override: str) -> str:
    text = redact(override)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _value(text: str, path: str) -> Node:
    try:
        node = parse(text, source=COMMAND_LINE.source, lines=False)
    except ConfigError as error:
        problem = str(error).removeprefix(f"{COMMAND_LINE}: ")
        raise ConfigError(f"{COMMAND_LINE}: {path}: {problem}") from None
    return Node(None, COMMAND_LINE) if node is None else node


def _set(node: Node, steps: tuple[str, ...], value: Node, *, parents: Steps) -> Node:
    if not steps:
        return merge(node, value)
    step, rest = steps[0], steps[1:]
    content = node.value
    shape = find_shape(parents)
    if content is None:
        content = list[Node]() if _index(step) is not None and shape and shape.items else dict[str, Node]()
    if is_list(content):
        return Node(_set_item(content, step, rest, value, parents=parents), node.origin)
    if not is_mapping(content):
        raise ConfigError(
            f"{COMMAND_LINE}: {dotted((*parents, *steps))}: {dotted(parents)} is a single value (from {node.origin}), "
            "so it has no fields"
        )
    if not rest:
        if value.value is None and step not in content and shape and shape.has_named_sections:
            raise ConfigError(
                f"{COMMAND_LINE}: {dotted((*parents, step))}: there is none to remove.{did_you_mean(step, content)} "
                f"{dotted((*parents, step))}={{}} adds one with its defaults"
            )
        return merge(Node(content, node.origin), Node({step: value}, node.origin))
    child = content.get(step, Node(None, COMMAND_LINE))
    return Node({**content, step: _set(child, rest, value, parents=(*parents, step))}, node.origin)


def _set_item(items: list[Node], step: str, rest: tuple[str, ...], value: Node, *, parents: Steps) -> list[Node]:
    index = _index(step)
    if index is None or index > len(items):
        indices = f"an index from 0 to {len(items)}, which appends" if items else "the index 0, since it is empty"
        raise ConfigError(
            f"{COMMAND_LINE}: {dotted((*parents, step, *rest))}: {dotted(parents)} is a list, it takes {indices}"
        )
    old = items[index] if index < len(items) else Node(None, COMMAND_LINE)
    return [*items[:index], _set(old, rest, value, parents=(*parents, index)), *items[index + 1 :]]


def _index(step: str) -> int | None:
    return int(step) if _INDEX.fullmatch(step) else None
