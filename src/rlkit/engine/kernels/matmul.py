"""Matrix products with weights that do not change.

Invariant: `product(x, w)` is `x @ w`, whether `w` is plain or packed, and with either a row of the result has the same
bits whatever rows stand beside it, provided that `x` has a multiple of `ROWS` rows.

On the CPU, weights that are only read are packed once for a kernel of our own (`rlkit.engine.kernels.kernels`): for the
few dozen rows of a decoding step it takes two thirds of the time of oneDNN's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rlkit.engine.kernels import kernels
from rlkit.engine.kernels.thread_team import share
from rlkit.engine.kernels.tiles import COLUMNS

ROWS = 8  # a multiple of `TILE_ROWS` on every processor
# Less than about a tenth of a millisecond of work is not worth a thread.
_SHARED_OPERATIONS = 10_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight [in, out] in panels of columns: `panels [⌈out / COLUMNS⌉, in, COLUMNS]`, filled up with zeros."""

    panels: NDArray[np.float32]
    columns: int


type Matrix = Tensor | Packed
"""A weight [in, out]."""


def pack(transposed: Tensor) -> Matrix:
    """A weight given as [out, in], packed where that helps; otherwise as a plain view [in, out]."""
    if transposed.device.type != "cpu" or transposed.dtype != torch.float32:
        return transposed.t()
    columns, inner = transposed.shape
    panels = torch.zeros(-(-columns // COLUMNS), inner, COLUMNS, dtype=torch.float32)
    whole = columns // COLUMNS
    full = whole * COLUMNS
    panels[:whole] = transposed[:full].view(whole, COLUMNS, inner).transpose(1, 2)
    if full < columns:
        panels[whole, :, : columns - full] = transposed[full:].t()
    return Packed(panels.numpy(), columns)


def plain(weight: Matrix) -> Tensor:
    """A weight that was never packed."""
    assert isinstance(weight, Tensor)
    return weight


def matrix_bytes(weight: Matrix) -> int:
    """The memory that a weight takes."""
    return weight.panels.nbytes if isinstance(weight, Packed) else weight.nbytes


def product(x: Tensor, weight: Matrix, *, out: Tensor | None = None) -> Tensor:
    """`x [N, in]` times `weight [in, out]`, plain or packed: [N, out].

    Args:
        out: its first rows take the result, if it is given; it needs them up to a multiple of `ROWS`.
    """
    if isinstance(weight, Tensor):
        return x @ weight if out is None else torch.mm(x, weight, out=out[: len(x)])
    count, x = len(x), pad_rows(x).contiguous()
    result = torch.empty(len(x), weight.columns, dtype=torch.float32) if out is None else out[: len(x)]
    rows, panels, results = x.numpy(), weight.panels, result.numpy()
    # What follows computes with addresses.
    if (rows.dtype, rows.shape[1]) != (np.float32, panels.shape[1]):
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, but the packed weight has {panels.shape[1]} float32 rows")
    if (results.dtype, results.shape) != (np.float32, (len(x), weight.columns)) or not result.is_contiguous():
        raise ValueError(f"out is {result.dtype} {list(result.shape)}, not float32 {[len(x), weight.columns]}")

    def part(first: int, last: int) -> None:
        kernels.multiply(rows, panels, results, first, last, panels.ctypes.data)

    operations = 2 * x.numel() * COLUMNS
    share(part, len(panels), least=-(-_SHARED_OPERATIONS // max(operations, 1)))
    return result[:count]


def pad_rows(x: Tensor) -> Tensor:
    """`x [n, …]` with zero rows up to a multiple of `ROWS`."""
    missing = -len(x) % ROWS
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
