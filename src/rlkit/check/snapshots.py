"""The state of an environment, as text that can be compared.

Invariant: two snapshots of an object that nobody changed are equal; values that cannot be looked into count as
unchanged.
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

MAX_VALUES = 100_000
"""A snapshot looks at this many values; a larger environment is compared in part."""

_PLAIN = (bool, int, float, str, list, dict, set, deque)

type Snapshot = Mapping[str, str]
"""From the path of a value, such as `history[0]`, to what it is."""


def snapshot(env: object) -> Snapshot:
    """Return every value that an environment holds, and the plain values that its own classes hold."""
    return dict(itertools.islice(_env_leaves(env), MAX_VALUES))


def changes(before: Snapshot, after: Snapshot, *, lazy: bool) -> Sequence[str]:
    """What differs, one line a value.

    Args:
        lazy: leave out private attributes that were absent or None and have been filled in.
    """
    lines: list[str] = []
    for path in sorted(before.keys() | after.keys(), key=lambda path: (len(path), path)):
        old, new = before.get(path, "nothing"), after.get(path, "nothing")
        top = path.split(".")[0].split("[")[0]
        filled = top.startswith("_") and before.get(top, "None") == "None"
        if old != new and not (lazy and filled):
            lines.append(f"{path}: {old} → {new}")
    return lines


def _env_leaves(env: object) -> Iterator[tuple[str, str]]:
    seen = dict[int, object]()
    for cls in type(env).__mro__:
        home = cls.__module__.split(".")[0]
        if home != "rlkit" and home not in sys.stdlib_module_names:
            for name, value in vars(cls).items():
                if not name.startswith("__") and isinstance(value, _PLAIN):
                    yield from _leaves(cast("object", value), f"{cls.__name__}.{name}", seen)
    for name, value in _fields(env):
        yield from _leaves(value, name, seen)


def _leaves(value: object, path: str, seen: dict[int, object]) -> Iterator[tuple[str, str]]:
    if isinstance(value, str | bytes | int | float | complex | None):
        # Python refuses to write more than 4,300 digits
        text = hex(value) if isinstance(value, int) and value.bit_length() > 64 else repr(value)
        yield path, _shorten(text)
    elif id(value) not in seen:
        seen[id(value)] = value  # kept, or another object could get its id
        yield path, _describe(value)
        for name, child in _children(value):
            yield from _leaves(child, path + name, seen)


def _children(value: object) -> Iterable[tuple[str, object]]:
    match value:
        case dict():
            entries = cast("dict[object, object]", value).items()
            return [(f"[{_shorten(repr(key))}]", item) for key, item in entries]
        case list() | tuple() | deque():
            return [(f"[{index}]", item) for index, item in enumerate(cast("Sequence[object]", value))]
        case type() | ModuleType() | FunctionType() | MethodType():
            return []
        case _ if type(value).__getstate__ is not object.__getstate__:
            return [(".", value.__getstate__())]  # its class says what its state is
        case _:
            return [(f".{name}", child) for name, child in _fields(value)]


def _fields(value: object) -> list[tuple[str, object]]:
    names: set[str] = set(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots: str | Sequence[str] = vars(cls).get("__slots__", ())
        names |= {slots} if isinstance(slots, str) else set(slots)
        # computed once from the task, as the environment's own attributes would be
        names -= {name for name, member in vars(cls).items() if isinstance(member, functools.cached_property)}
    return [(name, getattr(value, name, None)) for name in sorted(names - {"__dict__", "__weakref__"})]


def _describe(value: object) -> str:
    kind = type(value).__name__
    match value:
        case dict() | list() | tuple() | deque():
            text = f"{kind} of {len(cast('Sequence[object]', value))}"
        case Set():
            text = f"{kind} {_shorten(repr(sorted(map(repr, cast('Set[object]', value)))))}"
        case np.ndarray():
            array = cast("NDArray[np.generic]", value)
            text = f"array {array.dtype}{array.shape} {_digest(array.tobytes())}"
        case random.Random() | np.random.Generator():
            text = f"{kind} {_digest(pickle.dumps(value))}"
        case _ if hasattr(value, "__dict__") or isinstance(value, type):
            text = kind
        case _:
            text = repr(value)
            text = kind if " at 0x" in text else _shorten(text)  # an address says nothing about the state
    return text


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]}… {_digest(text.encode(errors='replace'))}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
