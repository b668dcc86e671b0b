"""Tables of the catalogue, from the hub, and kept.

Invariant: a table is read at one commit. It is asked of the hub once; afterwards it is read from rlkit's cache, with or
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

from rlkit import atomic
from rlkit.atomic import make_folder
from rlkit.envs.math.catalogue import Table
from rlkit.envs.math.files import Row, read_rows
from rlkit.errors import MissingError
from rlkit.hub import hub_problem
from rlkit.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterable

_FILE = "path to the file beside dataset (or, for a set that is kept apart, apart to a list with the file)"


def newest(repository: str) -> str:
    """The commit that was a repository's newest when this machine first asked.

    Raises:
        MissingError: the hub was never asked, and cannot be now.
    """
    kept = _folder() / f"{_safe(repository)}.commit"
    if not kept.is_file():
        _reach(repository)
        with _blamed(repository):
            from huggingface_hub import HfApi

            commit = HfApi().dataset_info(repository).sha
            assert commit is not None
        atomic.write_text(kept, commit)
    return kept.read_text(encoding="utf-8").strip()


def table_rows(table: Table, *, note: Callable[[str], None]) -> Iterator[Row]:
    """The rows of a table, fetched first if need be.

    Args:
        table: of the catalogue, with its commit.
        note: told that something is fetched.

    Raises:
        MissingError: the table is neither kept nor to be had; the message says how to use a file instead.
    """
    kept = _kept(table)
    if not kept.is_file():
        _reach(table.repository)
        name = f"{table.repository} ({table.config})" if table.config else table.repository
        note(f"reading {name} at {table.revision} from the Hugging Face hub")
        _fetch(table, kept)
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


def _fetch(table: Table, kept: Path) -> None:
    """Stream a table into a file, which is there whole or not at all."""
    from filelock import FileLock

    make_folder(kept.parent)
    with FileLock(kept.with_suffix(".lock")):  # processes that want it at once wait for the first
        if kept.is_file():
            return
        unfinished = kept.with_suffix(".unfinished")
        try:
            with _blamed(table.repository):
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
def _blamed(repository: str) -> Generator[None]:
    """Whatever the hub's libraries raise, as one line: their kinds of errors are many."""
    try:
        yield
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MissingError(
            f"{repository} cannot be had from the hub: {type(error).__name__}: {first}. To use a file instead, "
            f"set {_FILE}"
        ) from error
