"""Operations of a layer beside its matrix products: norms, rotary embedding, the gate.

Invariant: on the CPU in float32 the operations are compiled kernels, whose result for a row depends only on that row,
bit for bit. Otherwise, and if compiling is disabled, they are torch's with the same formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rlkit.engine.kernels import cpu_kernels
from rlkit.engine.kernels.jit_cache import COMPILES
from rlkit.engine.kernels.llvm import TILE_ROWS
from rlkit.engine.kernels.threads import parallel_for
from rlkit.engine.model.config import Activation

ROWS = TILE_ROWS
"""Products of more than one row have a multiple of this number of rows; the others are zeros."""


def pad_rows(x: Tensor) -> Tensor:
    """Append zero rows to `x [n, …]`, up to a multiple of `ROWS`."""
    padding = -len(x) % ROWS
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, padding)) if padding else x


type Rope = tuple[Tensor, Tensor]
"""Cosines and sines [N, 1, D] of the rotary embedding, or of the first dimensions of a head, if the others stay."""

# Minimum number of values per thread.
_SHARED_NUMBERS = 65_536


def has_kernels(x: Tensor) -> bool:
    """Return whether the kernels can compute with `x`."""
    return COMPILES and x.device.type == "cpu" and x.dtype == torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last dimension (Zhang and Sennrich 2019, eq. 4), in float32 at least."""
    if not has_kernels(x):
        x32 = x.to(torch.promote_types(x.dtype, torch.float32))
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    return cast("Tensor", _RmsNorm.apply(x, weight, eps))  # pyright: ignore[reportUnknownMemberType]  torch leaves it untyped


def glu(both: Tensor, activation: Activation = "silu") -> Tensor:
    """Return the activation of the first half of the columns of `both [N, 2I]`, times the second (Shazeer 2020)."""
    if not has_kernels(both):
        gate, up = both.chunk(2, -1)
        return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up
    return cast("Tensor", _Glu.apply(both, activation))  # pyright: ignore[reportUnknownMemberType]  torch leaves it untyped


def glu_gradient(both: Tensor, grad_out: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return the gradient at `both [N, 2I]` from the gradient at the result, `grad_out [N, I]`; and the result.

    `grad_out` may be overwritten.
    """
    if not has_kernels(both):
        gate, up = both.chunk(2, -1)
        argument, slope = gate, 1.0
        if activation == "gelu":
            argument = gate * (cpu_kernels.GELU_LINEAR + cpu_kernels.GELU_CUBIC * gate.square())
            slope = cpu_kernels.GELU_LINEAR + 3 * cpu_kernels.GELU_CUBIC * gate.square()
        sigmoid = torch.sigmoid(argument)
        grad_gate = grad_out * up * sigmoid * (1 + gate * slope * (1 - sigmoid))
        return torch.cat([grad_gate, grad_out * gate * sigmoid], -1), gate * sigmoid * up
    rows, out = _flatten_rows(both), _flatten_rows(grad_out)
    grad_both = torch.empty_like(rows)
    values, results, grad_values = _array(rows), _array(out), _array(grad_both)

    kernel, is_gelu = cpu_kernels.glu_gradient, activation == "gelu"
    _share_rows(lambda a, b: kernel(values[a:b], results[a:b], grad_values[a:b], is_gelu), rows)
    return grad_both, out


def apply_rope(rows: Tensor, heads: int, rope: Rope) -> Tensor:
    """Rotate the first `heads` of `rows [N, …, D]`, halves convention (Su et al. 2021, as in Llama checkpoints)."""
    width = rope[0].shape[-1]
    x, others = rows[:, :heads, :width], rows[:, heads:]
    first, second = x.chunk(2, -1)
    rotated = x * rope[0] + torch.cat([-second, first], -1) * rope[1]
    if width < rows.shape[-1]:
        rotated = torch.cat([rotated, rows[:, :heads, width:]], -1)
    return torch.cat([rotated, others], 1)


def apply_rope_in_place(rows: Tensor, heads: int, rope: Rope, *, inverse: bool = False) -> None:
    """Apply `apply_rope` in place, with kernels only; `inverse` undoes the rotation, and is its gradient."""
    cos, sin = _array(rope[0][:, 0]), _array(rope[1][:, 0])
    values = _array(rows)[:, :, : cos.shape[1]]
    direction = np.float32(-1 if inverse else 1)
    _share_rows(lambda a, b: cpu_kernels.rotate(values[a:b], heads, cos[a:b], sin[a:b], direction), rows)


def multiply_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x [N, M]` times the sigmoid of `gate [N, M]`."""
    if not has_kernels(x) or x.requires_grad or gate.requires_grad:
        return x * torch.sigmoid(gate)
    with np.errstate(over="ignore"):  # torch's exponential would depend on a number's place in the tensor
        return x / torch.from_numpy(1 + np.exp(-_array(gate)))


def exponentiate_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Replace `rows [N, V]` by the exponentials of their differences to the row's largest number.

    Return the largest number of each row, [N], and the sum of its exponentials, [N].
    """
    if not rows.is_contiguous():  # the kernel uses addresses
        raise ValueError(f"rows {list(rows.shape)} have strides {rows.stride()}, but must be contiguous")
    if not has_kernels(rows):
        peaks = rows.amax(-1)
        return peaks, rows.sub_(peaks[:, None]).exp_().sum(-1)
    peaks, sums = rows.new_empty(len(rows)), rows.new_empty(len(rows))
    values, peak_array, sum_array = _array(rows), _array(peaks), _array(sums)
    _share_rows(lambda a, b: cpu_kernels.exponentiate_rows(values[a:b], peak_array[a:b], sum_array[a:b]), rows)
    return peaks, sums


def split_heads(rows: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split `rows [N, H + 2K, D]` into queries [N, H, D], keys and values [N, K, D]."""
    sizes = [rows.shape[1] - 2 * kv_heads, kv_heads, kv_heads]
    return cast("tuple[Tensor, Tensor, Tensor]", rows.split(sizes, 1))  # pyright: ignore[reportUnknownMemberType]  torch leaves it untyped


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  torch's takes anything
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        rows = _flatten_rows(x)
        out = torch.empty_like(rows)
        values, results, scale, eps32 = _array(rows), _array(out), _array(weight), np.float32(eps)
        _share_rows(lambda a, b: cpu_kernels.rms_norm(values[a:b], scale, eps32, results[a:b]), rows)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  likewise
        x, weight = ctx.saved_tensors
        rows = _flatten_rows(x)
        grad_x = torch.empty_like(rows)
        values, grad_values, results = _array(rows), _array(_flatten_rows(grad_out)), _array(grad_x)
        scale, eps = _array(weight), np.float32(ctx.eps)
        kernel = cpu_kernels.rms_norm_gradient
        _share_rows(lambda a, b: kernel(values[a:b], scale, eps, grad_values[a:b], results[a:b]), rows)
        return grad_x.view(x.shape), None, None


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, activation: Activation) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  torch's takes anything
        ctx.save_for_backward(both)
        ctx.activation = activation
        rows = _flatten_rows(both)
        out = rows.new_empty(len(rows), rows.shape[1] // 2)
        values, results = _array(rows), _array(out)
        kernel, is_gelu = cpu_kernels.glu, activation == "gelu"
        _share_rows(lambda a, b: kernel(values[a:b], results[a:b], 0, results.shape[1], is_gelu), rows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  likewise
        (both,) = ctx.saved_tensors
        return glu_gradient(both, grad_out.clone(), ctx.activation)[0], None


def _flatten_rows(x: Tensor) -> Tensor:
    """Return a contiguous view or copy with all dimensions except the last joined."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _array(x: Tensor) -> NDArray[np.float32]:
    return x.detach().numpy()


def _share_rows(task: Callable[[int, int], None], rows: Tensor) -> None:
    """Call `task(first, last)` for ranges of rows, on several threads if there are enough."""
    parallel_for(task, len(rows), min_per_thread=-(-_SHARED_NUMBERS * len(rows) // max(rows.numel(), 1)))
