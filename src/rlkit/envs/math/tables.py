"""Tables of the catalogue, from the hub, and kept.

Invariant: a table of a known revision is asked of the hub once; afterwards it is read from rlkit's cache, with or
without a network. Only the columns that are used are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlkit.atomic import make_folder
from rlkit.envs.math.catalogue import Table
from rlkit.envs.math.files import Row, read_rows
from rlkit.errors import MissingError
from rlkit.hub import hub_problem
from rlkit.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterable

_FILE = "path to the file beside dataset (or, for a set that is kept apart, apart to a list with the file)"


def table_rows(table: Table, *, note: Callable[[str], None]) -> Iterator[Row]:
    """The rows of a table, fetched first if need be.

    Args:
        table: of the catalogue.
        note: told that something is fetched.

    Raises:
        MissingError: the table is neither kept nor to be had; the message says how to use a file instead.
    """
    kept = _kept(table)
    if not kept.is_file():
        if (problem := hub_problem()) is not None:
            raise MissingError(
                f"{table.repository} is not on this machine, and {problem}: download it where there is a network, and "
                f"set {_FILE}"
            )
        note(f"reading {table.repository}{f' ({table.config})' if table.config else ''} from the Hugging Face hub")
        _fetch(table, kept)
    return read_rows(kept)


def _kept(table: Table) -> Path:
    parts = [table.repository, table.config, table.split, table.revision or "newest", table.rows_max]
    name = "--".join(str(part) for part in parts if part is not None)
    return cache_dir() / "datasets" / (re.sub(r"[^\w.\-]", "--", name) + ".jsonl")


def _fetch(table: Table, kept: Path) -> None:
    """Stream a table into a file, which is there whole or not at all."""
    from filelock import FileLock

    make_folder(kept.parent)
    with FileLock(kept.with_suffix(".lock")):  # processes that want it at once wait for the first
        if kept.is_file():
            return
        unfinished = kept.with_suffix(".unfinished")
        try:
            with _blamed(table):
                _write(_streamed(table), table, unfinished)
            unfinished.replace(kept)
        finally:
            unfinished.unlink(missing_ok=True)


def _streamed(table: Table) -> Iterable[Row]:
    import datasets

    stream = datasets.load_dataset(
        table.repository, table.config, split=table.split, revision=table.revision, streaming=True
    )
    if stream.column_names is not None:  # of Parquet, only these columns are fetched
        stream = stream.select_columns([name for name in table.columns.used if name in stream.column_names])
    return cast("Iterable[Row]", stream)


def _write(rows: Iterable[Row], table: Table, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in islice(rows, table.rows_max):
            kept = {name: row[name] for name in table.columns.used if name in row}
            file.write(json.dumps(kept, ensure_ascii=False, default=str) + "\n")


@contextmanager
def _blamed(table: Table) -> Generator[None]:
    """Whatever the hub's libraries raise, as one line: their kinds of errors are many."""
    try:
        yield
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MissingError(
            f"{table.repository} cannot be had from the hub: {type(error).__name__}: {first}. To use a file instead, "
            f"set {_FILE}"
        ) from error
