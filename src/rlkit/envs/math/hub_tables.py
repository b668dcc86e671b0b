"""Tables of the catalogue: downloaded from the Hugging Face hub, and cached.

Invariant: a table is read at one commit. It is downloaded once; afterwards it is read from rlkit's cache, with or
without a network. Only the columns in use are cached, and a table that lacks one of them is not cached.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlkit._util import files
from rlkit._util.files.lock import make_once
from rlkit._util.paths import cache_dir
from rlkit.envs.math.catalogue import Table
from rlkit.envs.math.table_files import Row, read_rows
from rlkit.errors import MissingError, RlkitError, UsageError
from rlkit.tokenizers.hub import hub_problem

if TYPE_CHECKING:
    from datasets import IterableDataset

_FILE_HINT = "path to the file in addition to dataset (for an excluded set, add the file to exclude)"

_PROGRESS_S = 15.0  # interval between reports on a download


def newest_commit(repository: str) -> str:
    """Return the commit that was newest when this machine first asked the hub, or raise `MissingError`."""
    path = _folder() / f"{_escape(repository)}.commit"
    if not path.is_file():
        _check_hub(repository)
        with _translate_errors(repository):
            from huggingface_hub import HfApi

            commit = HfApi().dataset_info(repository).sha
            assert commit is not None
        files.write_text(path, commit)
    return path.read_text(encoding="utf-8").strip()


def table_rows(table: Table, *, note: Callable[[str], None]) -> Iterator[Row]:
    """Yield the rows of a table, downloaded first if it is not cached.

    Raises:
        MissingError: the table is not cached and cannot be downloaded; the message says how to use a file instead.
    """
    path = _cache_path(table)
    if not path.is_file():
        _check_hub(table.repository)
        name = f"{table.repository} ({table.config})" if table.config else table.repository
        note(f"reading {name} at {table.revision} from the Hugging Face hub")
        _download(table, path, note=lambda rows: note(f"reading {name}: {rows:,} rows so far"))
    return read_rows(path)


def _check_hub(repository: str) -> None:
    if (problem := hub_problem()) is not None:
        raise MissingError(
            f"{repository} is not on this machine, and {problem}: download it on a machine with a network, "
            f"and set {_FILE_HINT}"
        )


def _folder() -> Path:
    return cache_dir() / "datasets"


def _escape(name: str) -> str:
    return re.sub(r"[^\w.\-]", "--", name)


def _cache_path(table: Table) -> Path:
    assert table.revision is not None, "pinned"
    parts = [table.repository, table.config, table.split, table.revision, table.rows_max]
    name = "--".join(str(part) for part in parts if part is not None)
    return _folder() / f"{_escape(name)}.jsonl"


def _download(table: Table, path: Path, *, note: Callable[[int], None]) -> None:
    """Download a table into a file, which is either complete or absent."""

    def write(unfinished: Path) -> None:
        with _translate_errors(table.repository):
            _write_rows(_stream_rows(table), table, unfinished, note)

    make_once(path, write)


def _stream_rows(table: Table) -> Iterable[Row]:
    """Stream the rows of a table; from Parquet, download only the columns in use."""
    import datasets

    load = partial(datasets.load_dataset_builder, table.repository, table.config, revision=table.revision)
    builder = load()
    stream = cast("IterableDataset", builder.as_streaming_dataset(split=table.split))
    if stream.column_names is not None:
        _check_columns(table, stream.column_names)
    if hasattr(builder.config, "columns"):
        builder = load(columns=table.columns.names)
        return cast("IterableDataset", builder.as_streaming_dataset(split=table.split))
    return stream  # without Parquet, rows have all columns


def _check_columns(table: Table, names: Sequence[str]) -> None:
    missing = [name for name in table.columns.names if name not in names]
    if missing:
        raise UsageError(
            f"dataset: {table.repository} at {table.revision} has no column {missing[0]!r}; it has {', '.join(names)}. "
            f"Its columns have changed: set revision to an earlier commit, or set path, question and answer"
        )


def _write_rows(rows: Iterable[Row], table: Table, path: Path, note: Callable[[int], None]) -> None:
    due_s = time.monotonic() + _PROGRESS_S
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(islice(rows, table.rows_max)):
            if number == 0:
                _check_columns(table, list(row))
            used = {name: row.get(name) for name in table.columns.names}
            file.write(json.dumps(used, ensure_ascii=False, default=str) + "\n")
            if time.monotonic() >= due_s:
                note(number + 1)
                due_s = time.monotonic() + _PROGRESS_S


@contextmanager
def _translate_errors(repository: str) -> Generator[None]:
    """Translate every error of the hub's libraries into a `MissingError` of one line."""
    try:
        yield
    except RlkitError:
        raise
    except Exception as error:
        summary = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MissingError(
            f"{repository} cannot be downloaded from the hub: {type(error).__name__}: {summary}. "
            f"To use a file instead, set {_FILE_HINT}"
        ) from error
