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
from rlkit.view.library import Library, report_damage
from rlkit.view.records.reader import RecordReader, Row
from rlkit.view.run_reader import RunReader


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


def _read_page(reader: RecordReader, names: Sequence[str], query: Mapping[str, str]) -> Row:
    match [int(name) if re.fullmatch(r"\d{1,9}", name) else name for name in names]:
        case []:
            row = reader.run()
        case ["metrics"]:
            row = reader.metrics()
        case ["tasks"]:
            row = reader.tasks("step", "evaluation")
        case ["evaluations"]:
            row = reader.tasks("evaluation")
        case ["discovery"] if isinstance(reader, RunReader):
            row = {"searches": list_searches(reader.path, reader.search_envs())}
        case ["step" | "evaluation" as kind, int(number)]:
            row = reader.step((kind, number))
        case ["step" | "evaluation" as kind, int(number), "search"]:
            row = {"matches": reader.search((kind, number), query.get("q", ""))}
        case ["step" | "evaluation" as kind, int(number), "group", int(position)]:
            row = reader.group((kind, number), position)
        case ["step" | "evaluation" as kind, int(number), "episode", int(position), int(member), int(attempt)]:
            row = reader.episode((kind, number), (position, member, attempt))
        case ["step" | "evaluation", int(), "episode", int(), int(), int(), "file"] if isinstance(reader, RunReader):
            row = read_file(_read_page(reader, names[:-1], {})["info"], query.get("path", ""))
        case _:
            raise UsageError(f"{reader.path} has no page {'/'.join(names)!r}")
    return row
