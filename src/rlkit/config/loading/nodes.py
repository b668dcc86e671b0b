"""Tree of an unvalidated configuration: JSON values with their origins.

Invariant: every node has an origin; merging keeps the origin of the value that takes effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import BaseModel

from rlkit.errors import ConfigError
from rlkit.types import Json

type Scalar = bool | int | float | str | None
type KeyPath = tuple[str | int, ...]
"""A path into a configuration: keys of mappings and indices of lists."""

PLAIN_KEY = re.compile(r"[A-Za-z0-9_\-]+")


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a value: a file and line, the command line, or Python."""

    source: str  # path of the file as the user wrote it, `command line` or `python`
    line: int | None = None  # line of the file, from 1; None if there are no lines
    folder: Path | None = None  # base folder of relative paths; None for the working directory

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its origin."""

    value: Scalar | list[Node] | dict[str, Node]  # scalar, or a list or mapping of nodes
    origin: Origin  # origin of the value; for an entry of a mapping, the location of its key
    template: str | None = None  # text before interpolation; None if the value contains no variable
    is_null_override: bool = False  # True for a null that overrides an earlier value


def from_python(value: object, *, place: str = "") -> Node:
    """Convert plain Python values and pydantic models to nodes, below `place.`; omit unset fields of a model."""
    origin = Origin("python")
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value)
        return Node({str(key): from_python(child, place=f"{place}{key}.") for key, child in entries.items()}, origin)
    if isinstance(value, list | tuple):
        return Node([from_python(child, place=place) for child in cast("Sequence[object]", value)], origin)
    if isinstance(value, Path):
        return Node(str(value), origin)
    if value is None or isinstance(value, bool | int | float | str):
        return Node(value, origin)
    fix = "use null, booleans, numbers, strings, lists or mappings"
    raise ConfigError(f"{place[:-1]}: {type(value).__name__} is no setting: {fix}")


def merge(base: Node, over: Node) -> Node:
    """Merge `over` into `base`: mappings are merged key by key; other values replace the earlier value.

    An empty mapping or a null under a key also replaces the earlier value.
    """
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        if key not in merged or node.value == {}:
            merged[key] = node
        elif node.value is None:
            merged[key] = Node(None, node.origin, node.template, is_null_override=True)
        else:
            merged[key] = merge(merged[key], node)
    return Node(merged, over.origin)


def plain(node: Node) -> Json:
    """Return the value without origins."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    return [plain(child) for child in node.value] if isinstance(node.value, list) else node.value


def find(root: Node, keys: KeyPath) -> Node | None:
    """Return the node at a key path, or None."""
    node = root
    for key in keys:
        if isinstance(node.value, dict) and key in node.value:
            node = node.value[str(key)]
        elif isinstance(node.value, list) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
        else:
            return None
    return node


def walk(root: Node, keys: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Yield every node with its key path, from `root` on; a mapping or list comes before its content."""
    yield keys, root
    value = root.value
    entries = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for key, child in entries:
        yield from walk(child, (*keys, key))


def leaves(root: Node, keys: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Yield every scalar and every empty list or mapping under `root` with its key path."""
    nodes = walk(root, keys)
    return ((path, node) for path, node in nodes if not isinstance(node.value, list | dict) or not node.value)


def rewrite(node: Node, change: Callable[[KeyPath, Node], Node], *, keys: KeyPath = ()) -> Node:
    """Return a copy of the tree with `change(key_path, node)` in place of every node that `leaves` yields."""
    if isinstance(node.value, dict) and node.value:
        entries = {key: rewrite(child, change, keys=(*keys, key)) for key, child in node.value.items()}
        return Node(entries, node.origin)
    if isinstance(node.value, list) and node.value:
        items = [rewrite(child, change, keys=(*keys, index)) for index, child in enumerate(node.value)]
        return Node(items, node.origin)
    return change(keys, node)


def dotted(keys: KeyPath) -> str:
    """Render a key path as in overrides and messages: `envs."my.env".weight`."""
    return ".".join(_quote(key) for key in keys)


def _quote(key: str | int) -> str:
    text = str(key)
    return text if PLAIN_KEY.fullmatch(text) else json.dumps(text, ensure_ascii=not text.isprintable())
