"""Files with one JSON object per line.

Invariant: a line is on the disk once `append` has returned. A damaged file is a `UsageError` that names it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rlkit._util import files
from rlkit.errors import UsageError
from rlkit.types import Json


def append(path: Path, record: Mapping[str, Json]) -> None:
    """Append a line."""
    with path.open("ab", buffering=0) as file:
        first = not file.tell()
        files.append(file, (json.dumps(record) + "\n").encode())
        os.fsync(file.fileno())
    if first:
        files.sync_folder(path.parent)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines, none if the file does not exist; another process may be appending lines."""
    if not path.exists():
        return []
    # `splitlines` would also split at U+2028 and U+0085, which JSON allows inside a text.
    return [_parse_object(path, line) for line in _read_text(path).split("\n")[:-1]]


def read_object(path: Path) -> dict[str, Any]:
    """Return the only object of a JSON file."""
    return _parse_object(path, _read_text(path))


def repair(path: Path) -> None:
    """Drop the last line if the process died while it wrote it, and sync all other lines to the disk."""
    if path.exists():
        text = _read_text(path)
        complete = _complete_lines(text)
        if complete != text:
            files.write_text(path, complete)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files.sync_folder(path.parent)


def _complete_lines(text: str) -> str:
    return text[: text.rfind("\n") + 1]


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def _parse_object(path: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: it is nested too deeply
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is damaged: {text[:40]!r} is not a JSON object")
    return cast("dict[str, Any]", value)
