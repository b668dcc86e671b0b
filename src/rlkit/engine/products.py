"""Matrix products with weights that do not change.

Invariant: `product(x, w)` is `x @ w`, whether `w` is plain or packed, and with either a row of the result has the same
bits whatever rows stand beside it, provided that `x` has a multiple of `ROWS` rows.

On the CPU, weights that are only read are packed once in the order in which oneDNN's kernel wants them: for the few
dozen rows of a decoding step that is up to twice as fast as packing them anew in every product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 8
_TYPICAL_ROWS = 32


def pack(transposed: Tensor) -> Tensor:
    """A weight given as [out, in], packed where that helps; otherwise as a plain view [in, out]."""
    exact_cpu = transposed.device.type == "cpu" and transposed.dtype == torch.float32
    if not exact_cpu or not torch.backends.mkldnn.is_available():
        return transposed.t()
    return torch.ops.mkldnn._reorder_linear_weight(transposed.contiguous(), _TYPICAL_ROWS)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x [N, in]` times `weight [in, out]`, plain or packed: [N, out]."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return x @ weight


def pad_rows(x: Tensor) -> Tensor:
    """`x [n, …]` with zero rows up to a multiple of `ROWS`."""
    missing = -len(x) % ROWS
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
