# pyarrow has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false
"""Tables in files: JSON lines, JSON, Parquet, CSV or TSV.

Invariant: a row is a mapping from column to value, whatever the format; an error is one line that names
the file and the place in it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

from rlkit._util.paths import expand_user
from rlkit.config.loading.objects import missing_file
from rlkit.errors import UsageError

type Row = Mapping[str, object]


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file, whose suffix gives the format.

    Args:
        path: `.jsonl`, `.ndjson`, `.json` (a list of objects), `.parquet`, `.csv` or `.tsv`.

    Raises:
        UsageError: there is no such file, its suffix is unknown, or it cannot be read.
    """
    path = expand_user(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"path: {path} has no known format: its name must end in {', '.join(_READERS)}")
    if not path.is_file():
        raise UsageError(f"path: {missing_file(path.name, [path])}")
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise UsageError(f"path: {path} is not UTF-8 text, at byte {error.start}: save it as UTF-8") from error
    except (OSError, csv.Error) as error:
        raise UsageError(f"path: {path} cannot be read: {error}") from error


def _read_json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _check_row(_parse_json(line.strip(), f"{path}:{number}"), f"{path}:{number}")


def _read_json(path: Path) -> Iterator[Row]:
    rows = _parse_json(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(rows, list):
        raise UsageError(f"path: {path} must hold a list of objects; if each line is an object, rename it to .jsonl")
    for number, row in enumerate(cast("list[object]", rows)):
        yield _check_row(row, f"item {number} of {path}")


def _parse_json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise UsageError(f"path: {where} is not valid JSON: {error.msg} at {line}column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"path: {where} is not valid JSON: {error}") from None


def _check_row(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise UsageError(f"path: {where} is not a JSON object")
    return cast("Row", row)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path, pre_buffer=False)
    except pyarrow.ArrowException as error:
        raise UsageError(f"path: {path} is not a Parquet file: {error}") from None
    for batch in table.iter_batches(use_threads=False):
        yield from batch.to_pylist()


def _read_csv(path: Path, delimiter: str) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        yield from csv.DictReader(lines, delimiter=delimiter)


_READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": lambda path: _read_csv(path, ","),
    ".tsv": lambda path: _read_csv(path, "\t"),
}
