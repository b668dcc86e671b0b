"""The runs that the pages show, and the data of each page: a path, such as `run/arith/step/3`, and its JSON.

Invariant: the answer depends only on the path and the files, so a server and a static export give the same. An id names
the same run as long as the runs of earlier places stay where they are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from urllib.parse import quote, unquote

from pydantic_core import to_json

from rlkit._util.paths import expand_user, runs_dir
from rlkit.config.loading.run_config import find_run, is_run_directory
from rlkit.envs.harbor.trial_files import read_file
from rlkit.errors import RlkitError, UsageError
from rlkit.view.discovery import list_searches
from rlkit.view.records.cookbook import CookbookReader
from rlkit.view.records.inspect import InspectReader
from rlkit.view.records.reader import RecordReader, Row
from rlkit.view.records.verifiers import VerifiersReader
from rlkit.view.run_reader import RunReader

# Files that change when a run, or a record of another tool, has more to show.
_GROWING = ("run.json", "metrics.jsonl", "usage.json", "results.jsonl", "traces.jsonl")


@dataclass
class Library:
    """Runs by id."""

    places: Sequence[Path]  # folders of runs, runs, and records of other tools
    _summaries: dict[Path, tuple[object, Row]] = field(default_factory=dict[Path, tuple[object, Row]])

    @classmethod
    def find(cls, runs: Sequence[str]) -> Library:
        """Return the library of runs given by name or path; of all runs if none is given.

        Raises:
            UsageError: nothing of this name can be shown.
        """
        if not runs:
            return cls([runs_dir()])
        places = list[Path]()
        for run in runs:
            path = expand_user(run).absolute()
            if any(_list_readers(path)):
                places.append(path)
            elif is_run_directory(runs_dir() / run) or not path.exists():
                places.append(find_run(run))
            elif path.is_dir() and all(child.is_dir() for child in path.iterdir() if child.name[0] != "."):
                places.append(path)  # a run may appear in it
            else:
                raise UsageError(f"{path} holds no run of rlkit, and no record that rlkit can show")
        return cls(places)

    @property
    def start(self) -> str:
        """Fragment of the address to open: the page of the run if there is a single place and it is a run."""
        is_run = len(self.places) == 1 and find_reader(self.places[0]) is not None
        return f"#/run/{quote(_spell_name(self.places[0]), safe='')}" if is_run else ""

    def readers(self) -> dict[str, RecordReader]:
        """Return the reader of each run by the run's id: its name, with a number if several have the same."""
        readers = dict[str, RecordReader]()
        for reader in chain.from_iterable(map(_list_readers, self.places)):
            name = _spell_name(reader.path)
            names = chain([name], (f"{name}~{number}" for number in count(2)))
            readers[next(name for name in names if name not in readers)] = reader
        return readers

    def _find_run(self, run: str) -> RecordReader | None:
        """Return the reader of a run; without looking at the other runs if all are in one folder."""
        place = self.places[0]
        if len(self.places) > 1 or not place.is_dir() or "\\udc" in run or find_reader(place):
            return self.readers().get(run)
        is_listed = run[:1] != "." and run in os.listdir(place)  # noqa: PTH208  a fifth of the time
        return find_reader(place / run) if is_listed else None

    def respond(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        """Return the JSON of a path.

        Raises:
            UsageError: there is nothing at the path, or a file is damaged.
        """
        match [unquote(part) for part in path.split("/")]:
            case ["runs"]:
                row = self.summaries()
            case ["run", run, *parts]:
                if (reader := self._find_run(run)) is None:
                    raise UsageError(f"there is no run {run!r}")
                with _report_damage(reader.path):
                    row = _read_page(reader, parts, query or {}) | ({} if parts else {"id": run})
            case _:
                raise UsageError(f"there is no page {path!r}")
        try:
            return to_json(row, inf_nan_mode="null")  # five times as fast as `json`
        except ValueError:  # half of a character, or lists in each other beyond 250 levels
            finite = json.loads(json.dumps(row), parse_constant=lambda _: None)
            return json.dumps(finite, separators=(",", ":")).encode()

    def summaries(self) -> Row:
        """Return all runs, live ones first, then the newest first; a run that cannot be read says why."""
        rows: list[Row] = [{**self._summarize(reader), "id": name} for name, reader in self.readers().items()]
        rows.sort(key=lambda row: (not row["live"], -(row.get("started") or row.get("updated") or 0)))
        return {"folder": ", ".join(map(str, self.places)), "runs": rows}

    def _summarize(self, reader: RecordReader) -> Row:
        path = reader.path
        files = [path, *(path / file for file in _GROWING)]
        try:
            version = [file.stat().st_mtime_ns if file.exists() else 0 for file in files]
            known_version, row = self._summaries.get(path, (None, {}))
            if known_version != version or row["live"]:
                with _report_damage(path):
                    row = reader.summary()
                self._summaries[path] = version, row
        except (RlkitError, OSError) as error:
            row = {"name": path.name, "kind": "rlkit", "path": str(path), "status": "unreadable"}
            row |= {"live": False, "reason": str(error), "envs": list[str](), "tags": list[str]()}
        return row


def _spell_name(path: Path) -> str:
    return path.name.encode(errors="backslashreplace").decode()  # a name on the disk may be no UTF-8


def find_reader(path: Path) -> RecordReader | None:
    """Return the reader for a run, or for the records of another tool; None if there is neither."""
    if (path.is_dir() and not os.access(path, os.X_OK)) or is_run_directory(path):  # a private folder may be a run
        return RunReader(path)
    if path.suffix == ".eval" and path.is_file():
        return InspectReader(path)
    names = ("traces.jsonl", "results.jsonl", "metadata.json", "metrics.jsonl", "config.json")
    files = {name for name in names if (path / name).is_file()}
    if "traces.jsonl" in files or {"results.jsonl", "metadata.json"} <= files:
        return VerifiersReader(path)
    return CookbookReader(path) if {"metrics.jsonl", "config.json"} <= files else None


def _list_readers(place: Path) -> Iterator[RecordReader]:
    """Yield the reader of a place, or of each run and record in a folder, by name."""
    if reader := find_reader(place):
        yield reader
    elif place.is_dir():
        yield from filter(None, (find_reader(path) for path in sorted(place.iterdir()) if path.name[0] != "."))


@contextmanager
def _report_damage(path: Path) -> Generator[None]:
    """Raise `UsageError` if a value of an unexpected type stops a reader, because anyone may have written a record."""
    try:
        yield
    except (RlkitError, OSError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {type(error).__name__}: {error}") from error


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
