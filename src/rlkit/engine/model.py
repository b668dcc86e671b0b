"""The forward pass of a dense decoder (Llama, Qwen2, Qwen3), over packed sequences.

Invariant: with `isolate`, and `tokens` padded to a multiple of `ROWS`, the numbers of one sequence depend on its own
tokens and the weights only, bit for bit, whatever it is packed with. A float32 matrix product gives a row the same bits
at every row count that is a multiple of 8 (small and odd counts take other kernels), and `isolate` runs attention over
each sequence alone; without it, runs of equal length share a call, which is faster in training.

Packed means: the sequences stand one behind the other in `tokens [N]`, and `lengths` tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from rlkit.engine.config import ModelConfig
from rlkit.engine.lora import Adapter, LayerAdapter, Lora
from rlkit.engine.weights import Layer, Weights

ROWS = 8
_TABLE_POSITIONS = 1024

type KeepKv = Callable[[int, Tensor, Tensor], None]
"""Called once a layer with its index, keys [N, K, D] and values [N, K, D]."""


def trunk(
    weights: Weights,
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    adapter: Adapter | None = None,
    isolate: bool = False,
    keep: KeepKv | None = None,
) -> Tensor:
    """Hidden states after the final norm, [N, E], of packed `tokens [N] int64`; what exceeds `lengths` is padding."""
    config = weights.config
    total = sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    positions = functional.pad(positions, (0, len(tokens) - total))
    rope = rope_at(config, positions)
    x = weights.embedding[tokens]
    for index, layer in enumerate(weights.layers):
        lora = adapter.layer(index) if adapter else LayerAdapter.none()
        qk, v = project_qkv(config, layer, x, rope, lora.qkv)
        if keep is not None:
            keep(index, qk[:, config.heads :], v)
        mixed = _attend(config, qk, v, lengths, isolate=isolate)
        x = x + project(mixed, layer.o, lora.o)
        x = x + mlp(config, layer, x, lora)
    return rms_norm(x, weights.norm, config.norm_eps)


def project(x: Tensor, weight: Tensor, lora: Lora | None) -> Tensor:
    """`x @ weight`, plus the adapter's low-rank term where there is one."""
    y = x @ weight
    return y if lora is None else y + lora.delta(x)


def project_qkv(
    config: ModelConfig, layer: Layer, x: Tensor, rope: tuple[Tensor, Tensor], lora: Lora | None = None
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys together [N, H + K, D], and values [N, K, D]."""
    rows = project(rms_norm(x, layer.attention_norm, config.norm_eps), layer.qkv, lora)
    if layer.qkv_bias is not None:
        rows = rows + layer.qkv_bias
    split = rows.view(len(x), config.heads + 2 * config.kv_heads, config.head_dim)
    qk, v = split[:, : -config.kv_heads], split[:, -config.kv_heads :]
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(qk[:, : config.heads], layer.q_norm, config.norm_eps)
        qk = torch.cat([q, rms_norm(qk[:, config.heads :], layer.k_norm, config.norm_eps)], 1)
    return _rotate(qk, rope), v


def mlp(config: ModelConfig, layer: Layer, x: Tensor, lora: LayerAdapter) -> Tensor:
    """The gated feed-forward of `x [N, E]`, its norm included, without the residual."""
    both = project(rms_norm(x, layer.mlp_norm, config.norm_eps), layer.gate_up, lora.gate_up)
    gate, up = both.chunk(2, -1)
    return project(_silu(gate) * up, layer.down, lora.down)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019, eq. 4)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _silu(x: Tensor) -> Tensor:
    # The fused kernel takes another path where a thread's share ends, which would let the batch decide the last bit.
    return x / (1 + torch.exp(-x)) if torch.is_inference_mode_enabled() else functional.silu(x)


def rope_at(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, 1, D] of the rotary embedding at `positions [N]`."""
    last = int(positions.max()) if len(positions) else 0
    tables = [_rope_table(config, start) for start in range(0, last + 1, _TABLE_POSITIONS)]
    cos, sin = (torch.cat([table[i] for table in tables]) for i in (0, 1))
    return cos[positions][:, None], sin[positions][:, None]


@lru_cache(maxsize=64)
def _rope_table(config: ModelConfig, start: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1024, D] from position `start`: pieces of one size, so that no bit depends on the request."""
    frequencies = torch.tensor(config.inverse_frequencies(), dtype=torch.float32)
    angles = torch.arange(start, start + _TABLE_POSITIONS, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding with the halves convention (Su et al. 2021, as in Llama checkpoints), x [N, heads, D]."""
    first, second = x.chunk(2, -1)
    return x * rope[0] + torch.cat([-second, first], -1) * rope[1]


def _attend(config: ModelConfig, qk: Tensor, v: Tensor, lengths: Sequence[int], *, isolate: bool) -> Tensor:
    """Causal attention inside each sequence, [N, H · D]; rows past the last sequence are zero."""
    q, k = qk[:, : config.heads], qk[:, config.heads :]
    runs = [(1, n) for n in lengths] if isolate else [(len(list(same)), n) for n, same in groupby(lengths)]
    outputs: list[Tensor] = []
    start = 0
    for count, length in runs:
        rows = slice(start, start + count * length)
        start = rows.stop
        qs, ks, vs = (t[rows].view(count, length, -1, config.head_dim).transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True)
        outputs.append(mixed.transpose(1, 2).reshape(count * length, -1))
    if start < len(qk):
        outputs.append(qk.new_zeros(len(qk) - start, config.heads * config.head_dim))
    return torch.cat(outputs)
