"""Quantised numbers of frozen matrices: int8 by output channel, and NF4 by blocks of 64.

Invariant: a quantised number is one float32 product of its code's value and its scale, wherever it is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rlkit.engine.kernels.cpu_kernels import NF4_BLOCK
from rlkit.engine.kernels.llvm import NF4_VALUES
from rlkit.errors import UsageError

_INT8_MAX = 127


def quantise(transposed: Tensor, quantisation: str) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a matrix given as [out, in].

    `int8`: codes [out, in], the nearest multiples of a 127th of the largest magnitude of each output; scales [out, 1].
    `nf4` (Dettmers et al. 2023, with the table of bitsandbytes): codes [out, in / 2], two in a byte, the first in the
    low half; scales [out, ⌈in / 64⌉], the largest magnitude of each block.
    """
    weight = transposed.float()
    if quantisation == "int8":
        scales = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / _INT8_MAX
        return (weight / scales).round_().to(torch.int8), scales
    outputs, inner = weight.shape
    if inner % 2:
        raise UsageError(f"nf4: a matrix has {inner} inputs, an odd number: use int8")
    blocks = functional.pad(weight, (0, -inner % NF4_BLOCK)).view(outputs, -1, NF4_BLOCK)
    scales = blocks.abs().amax(2).clamp_(min=torch.finfo(torch.float32).tiny)
    values = torch.tensor(NF4_VALUES, dtype=torch.float32)
    codes = torch.bucketize(blocks / scales[:, :, None], (values[1:] + values[:-1]) / 2).to(torch.uint8)
    pairs = codes.view(outputs, -1)[:, :inner].view(outputs, inner // 2, 2)
    return pairs[:, :, 0] | pairs[:, :, 1] << 4, scales


def dequantise(panels: Tensor, scales: Tensor | None) -> Tensor:
    """Return the numbers [P, in, C] float32 of panels; the reference for the kernel `unpack`."""
    if scales is None:
        return panels.float()
    if panels.dtype == torch.int8:
        return panels.float() * scales
    codes = torch.stack([panels & 15, panels >> 4], 2).flatten(1, 2).long()
    return (
        torch.tensor(NF4_VALUES, dtype=torch.float32)[codes]
        * scales.repeat_interleave(NF4_BLOCK, 1)[:, : codes.shape[1]]
    )
