"""Frozen matrices in panels of columns, and their products.

Invariant: a product widens the stored numbers to float32 and sums in float32, so training and sampling compute with
the same numbers, up to the rounding of int8's scale. A row of `matmul` depends only on that row, bit for bit.

On the CPU the engine has a kernel for matrices in panels: for the few dozen rows of a decoding step it takes two thirds
of oneDNN's time, and for one row it takes the time to read the stored numbers. The hundreds of rows of a training step
are multiplied by torch, with a slab of columns at a time widened into a small buffer that stays in the cache.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlkit.engine.kernels import cpu_kernels
from rlkit.engine.kernels.llvm import BFLOAT16, COLUMNS, FLOAT32, INT8, NF4
from rlkit.engine.kernels.threads import parallel_for
from rlkit.engine.model.ops import has_kernels, pad_rows
from rlkit.engine.model.quantisation import dequantise, quantise

# Minimum work of a thread, about a tenth of a millisecond.
_SHARED_OPERATIONS = 10_000_000
# Numbers of a slab. Each thread keeps its buffer: new memory would take longer than the widening.
_SLAB = 1 << 20
_buffers = threading.local()
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.int8: INT8, torch.uint8: NF4}


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """A low-rank term x A B: `a` [in, rank], `b` [rank, out], and the rows of b that are not zero in each panel."""

    a: PackedMatrix
    b: PackedMatrix
    spans: NDArray[np.int64]  # [panels of b, 2], the first row and the number of rows


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A matrix [in, out] in panels, plus a low-rank term, if any; the term is not part of `unpack`."""

    panels: Tensor  # [⌈out / COLUMNS⌉, in, COLUMNS] of float32, bfloat16 or int8, or pairs of NF4 codes
    columns: int
    scales: Tensor | None = None  # of quantised numbers, as in `MATRIX_FIELDS`
    low_rank: LowRank | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the matrix, without that of the low-rank term."""
        return self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def inner(self) -> int:
        """Number of rows."""
        return self.panels.shape[1] * (2 if self.panels.dtype == torch.uint8 else 1)

    def unpack(self, first: int = 0, last: int | None = None, *, buffer: Tensor | None = None) -> Tensor:
        """Return the columns of the panels from `first` to `last`, exclusive, [in, columns] float32, in `buffer`."""
        panels = self.panels[first:last]
        shape = (self.inner, len(panels) * COLUMNS)
        out = torch.empty(shape, dtype=torch.float32) if buffer is None else buffer[: math.prod(shape)].view(shape)
        if has_kernels(out):
            cpu_kernels.unpack(self.fields(), first, out.numpy())
        else:
            numbers = dequantise(panels, None if self.scales is None else self.scales[first:last])
            out.view(self.inner, len(panels), COLUMNS).copy_(numbers.transpose(0, 1))
        return out[:, : self.columns - first * COLUMNS]

    def slabs(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slabs of columns with their places, [in, columns] float32 each; the next one overwrites a slab."""
        step = max(_SLAB // (self.inner * COLUMNS), 1)
        numbers = getattr(_buffers, "slab", None)
        if numbers is None or len(numbers) < step * self.inner * COLUMNS:
            numbers = _buffers.slab = np.empty(max(_SLAB, step * self.inner * COLUMNS), np.float32)
        for first in range(0, len(self.panels), step):
            slab = self.unpack(first, first + step, buffer=torch.from_numpy(numbers))
            yield slice(first * COLUMNS, first * COLUMNS + slab.shape[1]), slab

    def fields(self) -> NDArray[np.int64]:
        """Return the fields for compiled code, which are valid while the matrix exists."""
        panels, kind = self.panels.data_ptr(), _KINDS[self.panels.dtype]
        scales = 0 if self.scales is None else self.scales.data_ptr()
        low = self.low_rank
        if low is None:
            return np.array([panels, kind, scales, 0, 0, 0])
        return np.array([panels, kind, scales, low.b.panels.data_ptr(), low.spans.ctypes.data, low.a.columns])

    def field_pair(self) -> NDArray[np.int64]:
        """Return the fields and those of the left factor of the low-rank term, or zeros, [2, fields]."""
        fields = self.fields()
        return np.stack([fields, np.zeros_like(fields) if self.low_rank is None else self.low_rank.a.fields()])


type Matrix = Tensor | PackedMatrix
"""A matrix [in, out]."""


def pack(transposed: Tensor, quantisation: str | None = None) -> Matrix:
    """Pack a matrix given as [out, in] if there is a kernel for it; otherwise return a view [in, out]."""
    if transposed.device.type != "cpu" or transposed.dtype not in (torch.float32, torch.bfloat16):
        return transposed.t()
    if quantisation is None:
        return PackedMatrix(_arrange_panels(transposed), len(transposed))
    codes, scales = quantise(transposed, quantisation)
    return PackedMatrix(_arrange_panels(codes), len(transposed), _arrange_panels(scales))


def _arrange_panels(transposed: Tensor) -> Tensor:
    """Return numbers [out, n] in panels [⌈out / COLUMNS⌉, n, COLUMNS], padded with zeros."""
    columns, inner = transposed.shape
    panels = torch.zeros(-(-columns // COLUMNS), inner, COLUMNS, dtype=transposed.dtype)
    whole_panels = columns // COLUMNS
    whole_columns = whole_panels * COLUMNS
    panels[:whole_panels] = transposed[:whole_columns].view(whole_panels, COLUMNS, inner).transpose(1, 2)
    if whole_columns < columns:
        panels[whole_panels, :, : columns - whole_columns] = transposed[whole_columns:].t()
    return panels


def add_low_rank(matrix: PackedMatrix, a: Tensor, bs: Sequence[Tensor], scale: float) -> PackedMatrix:
    """Return the matrix with the low-rank term x Aᵀ B · scale; the stored numbers are shared.

    Args:
        a: [parts · rank, in]; the part of the columns that `bs[i]` writes uses the part i of its rows.
        bs: [rank, columns of the part] each.
    """
    spread = cast("Tensor", torch.block_diag(*bs))  # pyright: ignore[reportUnknownMemberType]  torch leaves it untyped
    ends = np.cumsum([b.shape[1] for b in bs])
    rank, starts = len(bs[0]), np.arange(len(matrix.panels)) * COLUMNS
    last_columns = np.minimum(starts + COLUMNS, matrix.columns) - 1
    first, last = (np.searchsorted(ends, columns, side="right") for columns in (starts, last_columns))
    spans = np.stack([first * rank, (last - first + 1) * rank], 1).astype(np.int64)
    left, right = (cast("PackedMatrix", pack(factor)) for factor in (a * scale, spread.t()))
    return replace(matrix, low_rank=LowRank(left, right, spans))


def matmul(x: Tensor, weight: Matrix, *, out: Tensor | None = None) -> Tensor:
    """Return `x [N, in] @ weight [in, out]`, with the low-rank term of the weight, [N, out]; not differentiable.

    Args:
        out: memory for the result; N rows, rounded up to a multiple of `ROWS`.
    """
    if isinstance(weight, Tensor):
        return x @ weight if out is None else torch.mm(x, weight, out=out[: len(x)])
    count = len(x)
    x = x.contiguous() if count == 1 and out is None else pad_rows(x).contiguous()
    result = torch.empty(len(x), weight.columns, dtype=torch.float32) if out is None else out[: len(x)]
    # The kernel uses addresses and does not check shapes.
    if (x.dtype, x.shape[1]) != (torch.float32, weight.inner):
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, but the matrix has {weight.inner} float32 rows")
    if (result.dtype, result.shape) != (torch.float32, (len(x), weight.columns)) or not result.is_contiguous():
        raise ValueError(f"out is {result.dtype} {list(result.shape)}, not float32 {[len(x), weight.columns]}")
    low = x.new_empty(len(x), 0) if weight.low_rank is None else matmul(x, weight.low_rank.a)
    if not has_kernels(x):
        for columns, slab in weight.slabs():
            result[:, columns] = x @ slab
        if weight.low_rank is not None:
            result += matmul(low, weight.low_rank.b)
        return result[:count]
    rows, low_rows, fields, results = x.numpy(), low.numpy(), weight.fields(), result.numpy()

    def multiply_panels(first: int, last: int) -> None:
        cpu_kernels.multiply_packed(rows, fields, low_rows, results, first, last, int(fields[0]))

    operations = 2 * x.numel() * COLUMNS
    parallel_for(multiply_panels, len(weight.panels), min_per_thread=-(-_SHARED_OPERATIONS // max(operations, 1)))
    return result[:count]


def multiply_rows(x: Tensor, weight: Matrix) -> Tensor:
    """Return `x [N, in] @ weight [in, out]` for many rows, [N, out]; differentiable once at x."""
    if isinstance(weight, Tensor):
        return x @ weight
    return cast("Tensor", _Product.apply(x, weight))  # pyright: ignore[reportUnknownMemberType]  torch leaves it untyped


def multiply_transposed(x: Tensor, weight: Matrix) -> Tensor:
    """Return `x [N, out] @ weightᵀ`, [N, in], for many rows."""
    if isinstance(weight, Tensor):
        return x @ weight.t()
    result = x.new_zeros(len(x), weight.inner)
    for columns, slab in weight.slabs():
        result.addmm_(x[:, columns], slab.t())
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedMatrix) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  torch's takes anything
        ctx.weight = weight
        y = x.new_empty(len(x), weight.columns)
        for columns, slab in weight.slabs():
            torch.mm(x, slab, out=y[:, columns])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  likewise
        return multiply_transposed(grad_y, ctx.weight), None
