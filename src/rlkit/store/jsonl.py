"""Files of JSON objects, one a line.

Invariant: a line is on the disk once `append` has returned; one that was being written when the process died can be
unfinished, and `repair` drops it.
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
    """Add a line."""
    with path.open("ab", buffering=0) as file:
        first = not file.tell()
        files.append(file, (json.dumps(record) + "\n").encode())
        os.fsync(file.fileno())
    if first:
        files.sync_folder(path.parent)


def read(path: Path) -> list[dict[str, Any]]:
    """Return all lines; none if there is no such file.

    It may be read while it is written: a last line that is not finished is left out.

    Raises:
        UsageError: the file is damaged.
    """
    return [_object(path, line) for line in _whole(_text(path)).splitlines()] if path.exists() else []


def read_object(path: Path) -> dict[str, Any]:
    """Return the one object that a file holds.

    Raises:
        UsageError: the file is damaged.
    """
    return _object(path, _text(path))


def read_metrics(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the steps of a metrics.jsonl and their metrics, without what was not finite, as `read` does."""
    found = list[tuple[int, dict[str, float]]]()
    for metrics in read(path):
        if not isinstance(step := metrics.pop("step", None), int):
            raise UsageError(f"{path} is damaged: a line has no step")
        found.append((step, {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}))
    return found


def repair(path: Path) -> None:
    """Drop a last line that was not finished; what stays is on the disk, though its writer died before that."""
    if path.exists():
        text = _text(path)
        whole = _whole(text)
        if whole != text:
            files.write_text(path, whole)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files.sync_folder(path.parent)


def _whole(text: str) -> str:
    return text[: text.rfind("\n") + 1]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def _object(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is damaged: {text[:40]!r} is no JSON object")
    return cast("dict[str, Any]", found)
