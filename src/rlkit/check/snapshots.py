"""Snapshots of an environment's state, as comparable text.

Invariant: two snapshots of an unchanged object are equal; values that cannot be inspected count as unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from types import FunctionType, MethodType, ModuleType
from typing import cast

import numpy as np
from numpy.typing import NDArray

MAX_VALUES = 100_000  # maximum number of values in a snapshot; further values are not compared
_PLAIN = (bool, int, float, str, list, dict, set, deque)

type Snapshot = Mapping[str, str]
"""Description of each value by its path, such as `history[0]`."""


def take_snapshot(env: object) -> Snapshot:
    """Return the values of an environment, and the plain values of its own classes."""
    return dict(itertools.islice(_iterate_env(env), MAX_VALUES))


def find_changes(before: Snapshot, after: Snapshot, *, allow_caches: bool) -> Sequence[str]:
    """Return a line for each value that differs; `allow_caches` ignores private ones that were absent or None."""
    lines: list[str] = []
    for path in sorted(before.keys() | after.keys(), key=lambda path: (len(path), path)):
        old, new = before.get(path, "nothing"), after.get(path, "nothing")
        top = path.split(".")[0].split("[")[0]
        is_cache = top.startswith("_") and before.get(top, "None") == "None"
        if old != new and not (allow_caches and is_cache):
            lines.append(f"{path}: {old} → {new}")
    return lines


def _iterate_env(env: object) -> Iterator[tuple[str, str]]:
    visited = dict[int, object]()
    for cls in type(env).__mro__:
        home = cls.__module__.split(".")[0]
        if home != "rlkit" and home not in sys.stdlib_module_names:
            for name, value in vars(cls).items():
                if not name.startswith("__") and isinstance(value, _PLAIN):
                    yield from _iterate_leaves(cast("object", value), f"{cls.__name__}.{name}", visited)
    for name, value in _list_fields(env):
        yield from _iterate_leaves(value, name, visited)


def _iterate_leaves(value: object, path: str, visited: dict[int, object]) -> Iterator[tuple[str, str]]:
    if isinstance(value, str | bytes | int | float | complex | None):
        # Python writes at most 4,300 digits
        text = hex(value) if isinstance(value, int) and value.bit_length() > 64 else repr(value)
        yield path, _shorten(text)
    elif id(value) not in visited:
        visited[id(value)] = value  # keeps the object alive, so that its id is not reused
        yield path, _describe(value)
        for name, child in _list_children(value):
            yield from _iterate_leaves(child, path + name, visited)


def _list_children(value: object) -> Iterable[tuple[str, object]]:
    match value:
        case dict():
            entries = cast("dict[object, object]", value).items()
            return [(f"[{_shorten(repr(key))}]", item) for key, item in entries]
        case list() | tuple() | deque():
            return [(f"[{index}]", item) for index, item in enumerate(cast("Sequence[object]", value))]
        case type() | ModuleType() | FunctionType() | MethodType():
            return []
        case _ if type(value).__getstate__ is not object.__getstate__:
            return [(".", value.__getstate__())]  # the class defines its state
        case _:
            return [(f".{name}", child) for name, child in _list_fields(value)]


def _list_fields(value: object) -> list[tuple[str, object]]:
    names: set[str] = set(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots: str | Sequence[str] = vars(cls).get("__slots__", ())
        names |= {slots} if isinstance(slots, str) else set(slots)
        # a cached property is computed once from the task
        names -= {name for name, member in vars(cls).items() if isinstance(member, functools.cached_property)}
    return [(name, getattr(value, name, None)) for name in sorted(names - {"__dict__", "__weakref__"})]


def _describe(value: object) -> str:
    kind = type(value).__name__
    match value:
        case dict() | list() | tuple() | deque():
            return f"{kind} of {len(cast('Sequence[object]', value))}"
        case Set():
            return f"{kind} {_shorten(repr(sorted(map(repr, cast('Set[object]', value)))))}"
        case np.ndarray():
            array = cast("NDArray[np.generic]", value)
            return f"array {array.dtype}{array.shape} {_digest(array.tobytes())}"
        case random.Random() | np.random.Generator():
            return f"{kind} {_digest(pickle.dumps(value))}"
        case _ if hasattr(value, "__dict__") or isinstance(value, type):
            return kind
        case _:
            text = repr(value)
            return kind if " at 0x" in text else _shorten(text)  # an address is not state


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]}… {_digest(text.encode(errors='replace'))}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
