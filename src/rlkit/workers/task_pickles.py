"""Pickles of tasks for workers.

Invariant: no two pickles have the same number. The error of a task that cannot be pickled names its attribute.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple, cast

import cloudpickle

from rlkit.env import Task
from rlkit.errors import UsageError

_PATH_MAX = 8  # maximum number of attributes in the name of what cannot be pickled
_SEARCH_S = 1.0  # seconds after which the name gets no further attribute, because each pickles a part of the task again


class TaskPickle(NamedTuple):
    """A pickled task, which is sent to a worker before its first call."""

    number: int
    data: bytes


_numbers = count()


def pickle_task(task: Task) -> TaskPickle:
    """Return a pickled task with a new number; UsageError names the attribute that cannot be pickled."""
    try:
        return TaskPickle(next(_numbers), cloudpickle.dumps(task))
    except (Exception, SystemExit) as error:  # pickling runs the user's code
        reason = " ".join(str(error).split())
        attribute = _find_unpicklable(task.env)
        raise UsageError(
            f"envs.{task.name}: workers need tasks that can be pickled, but {attribute} cannot ({reason}): create it "
            f"in `rollout`, make it a `rlkit.WorkerResource`, or set envs.{task.name}.workers to 0"
        ) from error


def _find_unpicklable(value: object) -> str:
    """Return the innermost attribute that cannot be pickled, such as `Page.browser.socket (of type socket)`."""
    path, current, end_s = type(value).__name__, value, time.monotonic() + _SEARCH_S
    for _ in range(_PATH_MAX):  # objects may refer to each other
        attribute = next((item for item in _attributes(current) if not _can_pickle(item[1])), None)
        if attribute is None:
            break
        path, current = f"{path}.{attribute[0]}", attribute[1]
        if time.monotonic() >= end_s:
            break
    return f"{path} (of type {type(current).__name__})"


def _attributes(value: object) -> Sequence[tuple[str, object]]:
    fields = cast("Mapping[str, object]", getattr(value, "__dict__", {}))
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return [*fields.items(), *((name, getattr(value, name)) for name in slots)]


def _can_pickle(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except (Exception, SystemExit):  # as above
        return False
    return True
