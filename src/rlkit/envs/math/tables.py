"""Tables of the catalogue, from the hub, and kept.

Invariant: a table is read at one commit. It is asked of the hub once; afterwards it is read from rlkit's cache, with or
without a network. Only the columns that are used are kept, and a table that lacks one of them is not kept at all.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from rlkit._util import files
from rlkit._util.files import make_folder
from rlkit._util.paths import cache_dir
from rlkit.chat.hub import hub_problem
from rlkit.envs.math.catalogue import Table
from rlkit.envs.math.files import Row, read_rows
from rlkit.errors import MissingError, RlkitError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

_FILE = "path to the file beside dataset (or, for a set that is kept apart, apart to a list with the file)"

_PROGRESS_S = 15.0
"""A table that takes longer to fetch says after each such time how many rows there are."""


def newest(repository: str) -> str:
    """Return the commit that was newest when this machine first asked; raise `MissingError` where it cannot ask."""
    kept = _folder() / f"{_safe(repository)}.commit"
    if not kept.is_file():
        _reach(repository)
        with _blamed(repository):
            from huggingface_hub import HfApi

            commit = HfApi().dataset_info(repository).sha
            assert commit is not None
        files.write_text(kept, commit)
    return kept.read_text(encoding="utf-8").strip()


def table_rows(table: Table, *, note: Callable[[str], None]) -> Iterator[Row]:
    """The rows of a table, fetched first if need be.

    Raises:
        MissingError: the table is neither kept nor to be had; the message says how to use a file instead.
    """
    kept = _kept(table)
    if not kept.is_file():
        _reach(table.repository)
        name = f"{table.repository} ({table.config})" if table.config else table.repository
        note(f"reading {name} at {table.revision} from the Hugging Face hub")
        _fetch(table, kept, note=lambda rows: note(f"reading {name}: {rows:,} rows so far"))
    return read_rows(kept)


def _reach(repository: str) -> None:
    if (problem := hub_problem()) is not None:
        raise MissingError(
            f"{repository} is not on this machine, and {problem}: download it where there is a network, and set {_FILE}"
        )


def _folder() -> Path:
    return cache_dir() / "datasets"


def _safe(name: str) -> str:
    return re.sub(r"[^\w.\-]", "--", name)


def _kept(table: Table) -> Path:
    assert table.revision is not None, "pinned"
    parts = [table.repository, table.config, table.split, table.revision, table.rows_max]
    name = "--".join(str(part) for part in parts if part is not None)
    return _folder() / f"{_safe(name)}.jsonl"


def _fetch(table: Table, kept: Path, *, note: Callable[[int], None]) -> None:
    """Stream a table into a file, which is there whole or not at all."""
    from filelock import FileLock

    make_folder(kept.parent)
    with FileLock(kept.with_suffix(".lock")):  # processes that want it at once wait for the first
        if kept.is_file():
            return
        unfinished = kept.with_suffix(".unfinished")
        try:
            with _blamed(table.repository):
                _write(_streamed(table), table, unfinished, note)
            unfinished.replace(kept)
        finally:
            unfinished.unlink(missing_ok=True)


class _Stream(Protocol):
    """An `IterableDataset` of `datasets`, which has no types."""

    column_names: Sequence[str] | None

    def __iter__(self) -> Iterator[Row]: ...


class _Builder(Protocol):
    config: object

    def as_streaming_dataset(self, split: str) -> _Stream: ...


def _builder(table: Table, **settings: Sequence[str]) -> _Builder:
    import datasets

    load = cast("Callable[..., _Builder]", datasets.load_dataset_builder)
    return load(table.repository, table.config, revision=table.revision, **settings)


def _streamed(table: Table) -> Iterable[Row]:
    """Stream a table; only the used columns are fetched where the format allows, as Parquet does."""
    builder = _builder(table)
    stream = builder.as_streaming_dataset(split=table.split)
    if stream.column_names is not None:
        _check_columns(table, stream.column_names)
    if hasattr(builder.config, "columns"):
        return _builder(table, columns=table.columns.used).as_streaming_dataset(split=table.split)
    return stream  # not Parquet: its rows are read whole


def _check_columns(table: Table, names: Sequence[str]) -> None:
    missing = [name for name in table.columns.used if name not in names]
    if missing:
        raise UsageError(
            f"dataset: {table.repository} at {table.revision} has no column {missing[0]!r}; it has {', '.join(names)}. "
            f"Its form has changed: set revision to an earlier commit, or path to a file, with question and answer"
        )


def _write(rows: Iterable[Row], table: Table, path: Path, note: Callable[[int], None]) -> None:
    due_s = time.monotonic() + _PROGRESS_S
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(islice(rows, table.rows_max)):
            if number == 0:
                _check_columns(table, list(row))
            kept = {name: row.get(name) for name in table.columns.used}
            file.write(json.dumps(kept, ensure_ascii=False, default=str) + "\n")
            if time.monotonic() >= due_s:
                note(number + 1)
                due_s = time.monotonic() + _PROGRESS_S


@contextmanager
def _blamed(repository: str) -> Generator[None]:
    """Whatever the hub's libraries raise, as one line: their kinds of errors are many."""
    try:
        yield
    except RlkitError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MissingError(
            f"{repository} cannot be had from the hub: {type(error).__name__}: {first}. To use a file instead, "
            f"set {_FILE}"
        ) from error
