"""Files with one JSON object per line.

Invariant: a line is on the disk once `append` has returned. A damaged file is a `UsageError` that names it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from rlkit._util import files
from rlkit.errors import UsageError
from rlkit.types import Json

_END_BYTES = 1 << 17


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


def read_ends(path: Path, patterns: Mapping[str, bool]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the first and last complete line with a match of each pattern, without reading a large file as a whole.

    Args:
        patterns: regular expressions, with True if such lines may be far from the beginning and the end, so that the
            whole file may be read.

    Returns:
        Two objects for each pattern, each empty if the first or last 128 KiB hold no such line.
    """
    if not path.exists():
        return [({}, {}) for _ in patterns]
    with path.open("rb") as file:
        head = file.read(_END_BYTES)
        file.seek(max(file.seek(0, os.SEEK_END) - _END_BYTES, 0))
        tail = file.read()
    ends, parse = _split_ends(head, tail), cache(partial(_parse_object, path))

    def find_line(lines: Sequence[bytes], search: Callable[[bytes], object]) -> dict[str, Any]:
        # The tail may begin inside a line.
        line = next((line for line in lines if line.startswith(b"{") and search(line)), b"{}")
        return parse(line.decode(errors="replace"))

    line_pairs = list[tuple[dict[str, Any], dict[str, Any]]]()
    for pattern, is_rare in patterns.items():
        search = re.compile(pattern.encode()).search
        is_whole = is_rare and not (search(head) and search(tail))
        first, last = _split_ends(*[path.read_bytes()] * 2) if is_whole else ends
        line_pairs.append((find_line(first, search), find_line(last, search)))
    return line_pairs


def _split_ends(head: bytes, tail: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return the complete lines of the beginning, and those of the end from the last line on."""
    return head.split(b"\n")[:-1], tail.split(b"\n")[-2::-1]


def read_object(path: Path) -> dict[str, Any]:
    """Return the only object of a JSON file."""
    return _parse_object(path, _read_text(path))


def repair(path: Path) -> None:
    """Drop the last line if the process died while it wrote it, and sync all other lines to the disk."""
    if path.exists():
        text = _read_text(path)
        complete = text[: text.rfind("\n") + 1]
        if complete != text:
            files.write_text(path, complete)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files.sync_folder(path.parent)


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
