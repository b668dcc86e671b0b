"""The state of an environment, as text that can be compared.

Invariant: two snapshots of an object that nobody changed are equal; values that cannot be looked into count as
unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections import deque
from collections.abc import Mapping, Sequence, Set
from types import FunctionType, MethodType, ModuleType
from typing import cast

import numpy as np
from numpy.typing import NDArray

MAX_VALUES = 100_000
"""A snapshot looks at this many values; a larger environment is compared in part."""

type Snapshot = Mapping[str, str]
"""From the path of a value, such as `history[0]`, to what it is."""


def snapshot(env: object) -> Snapshot:
    """Every value that an environment holds, and the plain values that its own classes hold."""
    walk = _Walk()
    for cls in type(env).__mro__:
        home = cls.__module__.split(".")[0]
        if home != "rlkit" and home not in sys.stdlib_module_names:
            for name, value in vars(cls).items():
                if not name.startswith("__") and isinstance(
                    value, bool | int | float | str | list | dict | set | deque
                ):
                    walk.visit(cast("object", value), f"{cls.__name__}.{name}")
    walk.fields(env, "")
    return walk.leaves


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


class _Walk:
    def __init__(self) -> None:
        self.leaves: dict[str, str] = {}
        self._seen: set[int] = set()

    def visit(self, value: object, path: str) -> None:
        if len(self.leaves) >= MAX_VALUES:
            return
        if isinstance(value, str | bytes | int | float | complex | None):
            # Python refuses to write more than 4,300 digits
            text = hex(value) if isinstance(value, int) and value.bit_length() > 64 else repr(value)
            self.leaves[path] = _short(text)
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self.leaves[path] = _told(value)
        match value:
            case dict():
                for key, item in cast("dict[object, object]", value).items():
                    self.visit(item, f"{path}[{_short(repr(key))}]")
            case list() | tuple() | deque():
                for index, item in enumerate(cast("Sequence[object]", value)):
                    self.visit(item, f"{path}[{index}]")
            case type() | ModuleType() | FunctionType() | MethodType():
                pass
            case _ if type(value).__getstate__ is not object.__getstate__:
                self.visit(value.__getstate__(), path + ".")  # its class says what its state is
            case _:
                self.fields(value, path + ".")

    def fields(self, value: object, prefix: str) -> None:
        for name in sorted(_field_names(value)):
            self.visit(getattr(value, name, None), prefix + name)


def _field_names(value: object) -> set[str]:
    names: set[str] = set(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots: str | Sequence[str] = vars(cls).get("__slots__", ())
        names |= {slots} if isinstance(slots, str) else set(slots)
        # computed once from the task, as the environment's own attributes would be
        names -= {name for name, member in vars(cls).items() if isinstance(member, functools.cached_property)}
    return names - {"__dict__", "__weakref__"}


def _told(value: object) -> str:
    kind = type(value).__name__
    match value:
        case dict() | list() | tuple() | deque():
            text = f"{kind} of {len(cast('Sequence[object]', value))}"
        case Set():
            text = f"{kind} {_short(repr(sorted(map(repr, cast('Set[object]', value)))))}"
        case np.ndarray():
            array = cast("NDArray[np.generic]", value)
            text = f"array {array.dtype}{array.shape} {_digest(array.tobytes())}"
        case random.Random():
            text = f"{kind} {_digest(repr(value.getstate()).encode())}"
        case np.random.Generator():
            text = f"{kind} {_digest(repr(value.bit_generator.state).encode())}"
        case _ if hasattr(value, "__dict__") or isinstance(value, type):
            text = kind
        case _:
            text = repr(value)
            text = kind if " at 0x" in text else _short(text)  # an address says nothing about the state
    return text


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]}… {_digest(text.encode(errors='replace'))}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
