"""The data of the pages: a path, such as `run/arith/step/3`, and its JSON.

Invariant: the answer depends only on the path and the files, so a server and a static export give the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from rlkit.envs.harbor.trial_files import read_file
from rlkit.errors import UsageError
from rlkit.view.discovery import list_searches
from rlkit.view.evaluations import list_evaluations
from rlkit.view.library import Library, report_damage
from rlkit.view.records import RecordReader
from rlkit.view.records.reader import Place, Row, Step
from rlkit.view.run_reader import RunReader, read_lines


def respond(library: Library, path: str, query: Mapping[str, str] | None = None) -> bytes:
    """Return the JSON of a path.

    Raises:
        UsageError: there is nothing at the path, or a file is damaged.
    """
    match [unquote(part) for part in path.split("/")]:
        case ["runs"]:
            row = library.summaries()
        case ["run", run, *parts]:
            reader = library.read(run)
            with report_damage(reader.path):
                row = _read_page(reader, parts, query or {})
            row = row if parts else {**row, "id": run}
        case _:
            raise UsageError(f"there is no page {path!r}")
    try:
        return json.dumps(row, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:  # a number that JSON does not support is null
        finite = json.loads(json.dumps(row), parse_constant=lambda _: None)
        return json.dumps(finite, separators=(",", ":")).encode()


def _read_page(reader: RecordReader, parts: Sequence[str], query: Mapping[str, str]) -> Row:
    match parts:
        case []:
            return reader.run()
        case ["metrics"]:
            return reader.metrics()
        case ["tasks"]:
            return reader.tasks()
        case ["evaluations"] if isinstance(reader, RunReader):
            return {"evaluations": list_evaluations(reader.path, dict(read_lines(reader.path / "metrics.jsonl")))}
        case ["discovery"] if isinstance(reader, RunReader):
            return {"searches": list_searches(reader.path, reader.search_envs())}
        case ["step" | "evaluation" as kind, number, *places]:
            return _read_step(reader, (kind, _number(number)), places, query)
        case _:
            raise UsageError(f"{reader.path} has no page {'/'.join(parts)!r}")


def _read_step(reader: RecordReader, step: Step, parts: Sequence[str], query: Mapping[str, str]) -> Row:
    match parts:
        case []:
            return reader.step(step)
        case ["group", position]:
            return reader.group(step, _number(position))
        case ["search"]:
            return {"matches": reader.search(step, query.get("q", ""))}
        case ["episode", position, member, attempt]:
            return reader.episode(step, _place(position, member, attempt))
        case ["episode", position, member, attempt, "file"] if isinstance(reader, RunReader):
            episode = reader.episode(step, _place(position, member, attempt))
            return read_file(episode["info"], query.get("path", ""))
        case _:
            raise UsageError(f"a step has no page {'/'.join(parts)!r}")


def _place(position: str, member: str, attempt: str) -> Place:
    return _number(position), _number(member), _number(attempt)


def _number(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise UsageError(f"{text!r} is no number of a page")
    return int(text)
