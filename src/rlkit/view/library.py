"""The runs that a page shows: folders of runs, single runs, and records of other tools.

Invariant: an id names the same run as long as the runs of earlier places stay where they are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

from rlkit._util.paths import runs_dir
from rlkit.config.loading.run_config import find_run, is_run_directory
from rlkit.errors import RlkitError, UsageError
from rlkit.view.records.cookbook import CookbookReader
from rlkit.view.records.inspect import InspectReader
from rlkit.view.records.reader import RecordReader, Row
from rlkit.view.records.verifiers import VerifiersReader
from rlkit.view.run_reader import RunReader

_GROWING = ("run.json", "metrics.jsonl", "usage.json", "results.jsonl", "traces.jsonl")
"""Files that change when a run, or a record of another tool, has more to show."""


@dataclass
class Library:
    """Runs by id.

    Args:
        places: folders of runs, runs, and records of other tools.
    """

    places: Sequence[Path]
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
            path = Path(run).expanduser().absolute()
            if any(_list_runs(path)):
                places.append(path)
            elif is_run_directory(runs_dir() / run) or not path.exists():
                places.append(find_run(run))
            elif path.is_dir() and all(child.is_dir() for child in path.iterdir() if child.name[0] != "."):
                places.append(path)  # a run may appear in it
            else:
                raise UsageError(f"{path} holds no run of rlkit, and no record that rlkit can show")
        return cls(places)

    def paths(self) -> dict[str, Path]:
        """Return the path of each run by its id: its name, with a number if several have the same."""
        paths = dict[str, Path]()
        for path in chain.from_iterable(map(_list_runs, self.places)):
            names = chain([path.name], (f"{path.name}~{number}" for number in count(2)))
            paths[next(name for name in names if name not in paths)] = path
        return paths

    def read(self, run: str) -> RecordReader:
        """Return the reader of a run; raise `UsageError` if there is none of this id."""
        if (path := self.paths().get(run)) is None:
            raise UsageError(f"there is no run {run!r}")
        return _make_reader(path)

    def summaries(self) -> Row:
        """Return all runs, live ones first, then the newest first; a run that cannot be read says why."""
        rows = [self._summarize(name, path) for name, path in self.paths().items()]
        rows.sort(key=lambda row: (not row["live"], -(row.get("started") or row.get("updated") or 0)))
        return {"folder": ", ".join(map(str, self.places)), "runs": rows}

    def _summarize(self, name: str, path: Path) -> Row:
        files = [path, *(path / file for file in _GROWING)]
        version = [file.stat().st_mtime_ns if file.exists() else 0 for file in files]
        known_version, row = self._summaries.get(path, (None, {}))
        if known_version != version or row["live"]:
            try:
                with report_damage(path):
                    row = _make_reader(path).summary()
            except (RlkitError, OSError) as error:
                row = {"name": path.name, "kind": "rlkit", "path": str(path), "status": "unreadable"}
                row |= {"live": False, "reason": str(error), "envs": list[str](), "tags": list[str]()}
            self._summaries[path] = version, row
        return {**row, "id": name}


@contextmanager
def report_damage(path: Path) -> Generator[None]:
    """Raise `UsageError` if a value of an unexpected type stops a reader, because anyone may have written a record."""
    try:
        yield
    except (RlkitError, OSError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def find_reader(path: Path) -> RecordReader | None:
    """Return the reader for a run, or for the records of another tool; None if there is neither."""
    if is_run_directory(path):
        return RunReader(path)
    if path.suffix == ".eval" and path.is_file():
        return InspectReader(path)
    names = ("traces.jsonl", "results.jsonl", "metadata.json", "metrics.jsonl", "config.json")
    files = {name for name in names if (path / name).is_file()}
    if "traces.jsonl" in files or {"results.jsonl", "metadata.json"} <= files:
        return VerifiersReader(path)
    return CookbookReader(path) if {"metrics.jsonl", "config.json"} <= files else None


def _make_reader(path: Path) -> RecordReader:
    if (reader := find_reader(path)) is None:
        raise UsageError(f"{path} holds no run")
    return reader


def _list_runs(place: Path) -> Iterator[Path]:
    """Yield a place that can be shown, or what can be shown in a folder, by name."""
    if find_reader(place):
        yield place
    elif place.is_dir():
        yield from (path for path in sorted(place.iterdir()) if path.name[0] != "." and find_reader(path))
