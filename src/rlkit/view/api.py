"""The data of the pages: a path, such as `run/arith/step/3`, and its JSON.

Invariant: the answer depends only on the path and the files, so a server and a static export give the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from rlkit.errors import UsageError
from rlkit.view.library import Library, report_damage
from rlkit.view.records import RecordReader
from rlkit.view.run_reader import RunReader
from rlkit.view.tables import Kind, Row

_PARTS = ("metrics", "tasks", "evaluations", "discovery")


def respond(library: Library, path: str, query: Mapping[str, str] | None = None) -> bytes:
    """Return the JSON of a path.

    Raises:
        UsageError: there is nothing at the path, or a file is damaged.
    """
    parts = [unquote(part) for part in path.split("/")]
    row = library.summaries() if parts == ["runs"] else _read_page(library, parts, query or {})
    try:
        return json.dumps(row, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:  # a number that JSON does not support is null
        finite = json.loads(json.dumps(row), parse_constant=lambda _: None)
        return json.dumps(finite, separators=(",", ":")).encode()


def _read_page(library: Library, parts: Sequence[str], query: Mapping[str, str]) -> Row:
    if parts[0] != "run" or len(parts) < 2:
        raise UsageError(f"there is no page {'/'.join(parts)!r}")
    reader = library.read(parts[1])
    with report_damage(reader.path):
        return _read_run(reader, parts[1:], query)


def _read_run(reader: RecordReader, parts: Sequence[str], query: Mapping[str, str]) -> Row:
    run, *places = parts
    match places:
        case []:
            return {**reader.run(), "id": run}
        case ["metrics"]:
            return reader.metrics()
        case ["tasks"]:
            return reader.tasks()
        case ["evaluations"] if isinstance(reader, RunReader):
            return reader.evaluations()
        case ["discovery"] if isinstance(reader, RunReader):
            return reader.discovery()
        case ["step" | "evaluation" as kind, number, *rest]:
            return _read_step(reader, kind, _number(number), rest, query)
        case _:
            raise UsageError(f"{run} has no page {'/'.join(places)!r}")


def _read_step(reader: RecordReader, kind: Kind, number: int, rest: Sequence[str], query: Mapping[str, str]) -> Row:
    match rest:
        case []:
            return reader.step(number, kind=kind)
        case ["group", position]:
            return reader.group(number, _number(position), kind=kind)
        case ["episode", position, member, attempt]:
            return reader.episode(number, *map(_number, (position, member, attempt)), kind=kind)
        case ["search"] if isinstance(reader, RunReader):
            return reader.search(number, query.get("q", ""), kind=kind)
        case ["episode", position, member, attempt, "file"] if isinstance(reader, RunReader):
            place = map(_number, (position, member, attempt))
            return reader.file(number, *place, path=query.get("path", ""), kind=kind)
        case _:
            raise UsageError(f"a step has no page {'/'.join(rest)!r}")


def _number(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise UsageError(f"{text!r} is no number of a page")
    return int(text)
