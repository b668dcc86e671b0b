"""Sparse matrices of the wire format.

Invariant: a malformed one is refused by name, and nothing larger than `VALUES_MAX` is ever allocated.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlkit.errors import UsageError

VALUES_MAX = 16 << 20


def dense_of[T: np.generic](
    name: str,
    values: NDArray[T],
    starts: NDArray[np.int64],
    columns: NDArray[np.int64],
    shape: tuple[int, ...],
    *,
    pad: int = 0,
) -> NDArray[T]:
    """Make a tensor [N, K] in compressed sparse rows dense, with `pad` where nothing is listed."""
    if len(shape) != 2:
        raise UsageError(f"{name}: a sparse tensor needs a shape [N, K], not {list(shape)}")
    if not 0 <= shape[0] * shape[1] <= VALUES_MAX:
        raise UsageError(f"{name}: shape {list(shape)} is too large; at most {VALUES_MAX} values are taken")
    if len(starts) != shape[0] + 1 or starts[0] != 0 or starts[-1] != len(values) or (starts[1:] < starts[:-1]).any():
        raise UsageError(
            f"{name}.crow_indices: {shape[0]} rows need {shape[0] + 1} numbers that rise from 0 to {len(values)}, "
            "the number of values"
        )
    if len(columns) != len(values) or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise UsageError(f"{name}.col_indices: {len(values)} numbers in 0 … {shape[1] - 1} are needed")
    rows = np.repeat(np.arange(shape[0]), np.diff(starts))
    filled = np.zeros(shape, dtype=np.bool_)
    filled[rows, columns] = True
    if np.count_nonzero(filled) != len(values):
        raise UsageError(f"{name}.col_indices: a column is listed twice in a row")
    dense = np.full(shape, pad, dtype=values.dtype)
    dense[rows, columns] = values
    return dense
