"""Locations in Python code, for messages: preferably in the user's code, not in libraries.

Invariant: a result is the innermost line of the user's code, if there is any.
"""

from __future__ import annotations

import asyncio.events
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rlkit._util.json_values import safe_str

# File of the frame that runs each callback of an event loop.
_EVENTS = asyncio.events.Handle._run.__code__.co_filename
_DEEPEST_CAUSE = 20
_DEEPEST_FRAME = 500


class Place(NamedTuple):
    """A line of code: file, line number and function name."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_user_code(self) -> bool:
        """True if the code belongs neither to rlkit nor to a library."""
        return not self.file.startswith("<") and not any(self.file.startswith(folder) for folder in _libraries())


def error_place(error: BaseException) -> Place | None:
    """Return the line of the user's code that raised an error or its cause; otherwise the error's last line."""
    stacks = [_places(cause) for cause in iter_causes(error)]
    for stack in reversed(stacks):  # the first cause comes last
        for place in reversed(stack):
            if place.is_user_code:
                return place
    return next((stack[-1] for stack in stacks if stack), None)


def describe_error(error: BaseException) -> str:
    """Return an error and the line that raised it, such as `KeyError: 'mine' at file:line`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {safe_str(error)}{place}"


def iter_causes(error: BaseException, *, suppressed: bool = False) -> Iterator[BaseException]:
    """Yield an error and its chain of causes; with `suppressed` also those that a `from None` hides."""
    cause: BaseException | None = error
    for _ in range(_DEEPEST_CAUSE):
        if cause is None:
            return
        yield cause
        is_last = cause.__suppress_context__ and not suppressed
        cause = cause.__cause__ or (None if is_last else cause.__context__)


def stack_place(frame: FrameType) -> Place:
    """Return the user's line that a thread is running in its event loop; if there is none, its innermost line."""
    stack = list[Place]()
    outer: FrameType | None = frame
    while outer is not None and len(stack) < _DEEPEST_FRAME:
        code = outer.f_code
        if code.co_name == "_run" and code.co_filename == _EVENTS:
            break
        stack.append(Place(code.co_filename, outer.f_lineno or 0, code.co_name))
        outer = outer.f_back
    return next((place for place in stack if place.is_user_code), stack[0] if stack else Place("<asyncio>", 0, "_run"))


def _places(error: BaseException) -> list[Place]:
    stack = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    return [Place(frame.filename, frame.lineno or 0, frame.name) for frame in stack]


@cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of rlkit, of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    folders = [Path(__file__).parents[1], *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))]
    return tuple(f"{Path(folder).resolve()}/" for folder in folders) + tuple(f"{folder}/" for folder in folders)
