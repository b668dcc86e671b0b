# pyarrow has no types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownParameterType=false, reportMissingTypeStubs=false
"""Columns of Parquet tables: read in one call, and columns of lists made from numpy arrays without Python objects."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlkit.errors import UsageError

if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
    # Arrow's own allocator asks for huge pages; clearing them takes longer than writing a table.
    pa.set_memory_pool(pa.system_memory_pool())


def read_columns(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Return columns of a file, by default all; raise `UsageError` if it is missing or damaged."""
    try:
        return pq.ParquetFile(path, pre_buffer=False).read(columns, use_threads=False)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist") from None
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def join_arrays(arrays: Sequence[Any], kind: pa.DataType) -> pa.ListArray:
    """Return a column whose rows are the given arrays."""
    values = np.concatenate(arrays) if arrays else np.empty(0)
    return make_lists(pa.array(values, kind), [len(array) for array in arrays])


def make_lists(values: pa.Array, lengths: Sequence[int]) -> pa.ListArray:
    """Return a column whose rows are consecutive parts of `values`."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values)


def split_lists(lists: pa.ListArray) -> list[Any]:
    """Return the rows of a column of numbers as arrays."""
    return np.split(as_numpy(lists.flatten()), row_ends(lists)[1:-1]) if len(lists) else []


def row_ends(lists: pa.ListArray) -> list[int]:
    """Return 0 and the end of each row among all values."""
    return [0, *np.cumsum(as_numpy(lists.value_lengths())).tolist()]


def as_numpy(column: pa.Array) -> Any:
    """Return a column without nulls as an array. Its `to_numpy` would import pandas: 0.2 s and 40 MB."""
    is_bool = pa.types.is_boolean(column.type)
    return np.from_dlpack(column.cast(pa.uint8())).view(np.bool_) if is_bool else np.from_dlpack(column)
