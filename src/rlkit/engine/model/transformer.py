"""The forward pass of a dense decoder, over packed sequences.

Invariant: with packed weights the numbers of one sequence depend on its own tokens and the weights only, bit for bit,
whatever it stands with (in float32 on the CPU).

Packed means: the sequences stand one behind the other in `tokens [N]`, laid out as `rlkit.engine.model.attention` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType] torch types it partly

from rlkit.engine.model.attention import Attention, Span, positions
from rlkit.engine.model.config import ModelConfig
from rlkit.engine.model.lora import NO_ADAPTER, Adapter, LayerAdapter, Lora
from rlkit.engine.model.ops import Matrix, Rope, matmul, require_tensor, rms_norm, split_heads, swiglu
from rlkit.engine.model.weights import Layer, Weights

_TABLE_POSITIONS = 1024
# A training step keeps about a megabyte a token for the backward pass of a small model. Beyond this many tokens in
# one go only what enters each layer is kept, and the rest is computed again: a third slower, a twentieth of the memory.
_KEEP_ALL_TOKENS = {"cpu": 1024, "cuda": 16_384}

type StoreKv = Callable[[int, Tensor, Tensor], None]
"""Called once a layer with its index, keys [N, K, D] and values [N, K, D]."""


def compute_hidden(
    weights: Weights,
    tokens: Tensor,
    spans: Sequence[Span],
    *,
    adapter: Adapter | None = None,
    keep: StoreKv | None = None,
) -> Tensor:
    """Hidden states after the final norm, [N, E], of packed `tokens [N] int64`; rows of no span are padding."""
    config = weights.config
    x = weights.embedding[tokens]
    attention = Attention(spans, compute_rope(config, positions(spans, len(tokens)), x), config.kv_heads)

    def layer_of(index: int, x: Tensor) -> Tensor:
        layer = weights.layers[index]
        lora = adapter.layer(index) if adapter else NO_ADAPTER
        mixed, rows = attention(project_qkv(config, layer, x, lora.qkv), rotary=layer.rotary)
        if keep is not None:
            keep(index, *split_heads(rows, config.kv_heads)[1:])
        x = add_attention(layer, x, mixed, lora)
        return x + mlp(config, layer, x, lora)

    recompute = torch.is_grad_enabled() and len(tokens) > _KEEP_ALL_TOKENS[tokens.device.type]
    for index in range(config.layers):
        x = checkpoint(layer_of, index, x, use_reentrant=False) if recompute else layer_of(index, x)
    return rms_norm(x, weights.norm, config.norm_eps)


def project(x: Tensor, weight: Matrix, lora: Lora | None) -> Tensor:
    """`x @ weight`, plus the adapter's low-rank term where there is one."""
    return matmul(x, weight) if lora is None else lora.multiply(x, require_tensor(weight))


def add_attention(layer: Layer, x: Tensor, mixed: Tensor, lora: LayerAdapter) -> Tensor:
    """The residual stream `x [N, E]` after attention, whose heads gave `mixed [N, H · D]`."""
    y = x + project(mixed, layer.o, lora.o)
    return y if layer.o_bias is None else y + layer.o_bias


def project_qkv(config: ModelConfig, layer: Layer, x: Tensor, lora: Lora | None = None) -> Tensor:
    """Queries and keys, not rotated yet, and values, [N, H + 2K, D]."""
    rows = project(rms_norm(x, layer.attention_norm, config.norm_eps), layer.qkv, lora)
    if layer.qkv_bias is not None:
        rows = rows + layer.qkv_bias
    rows = rows.view(len(x), config.heads + 2 * config.kv_heads, config.head_dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k, v = split_heads(rows, config.kv_heads)
        q, k = rms_norm(q, layer.q_norm, config.norm_eps), rms_norm(k, layer.k_norm, config.norm_eps)
        rows = torch.cat([q, k, v], 1)
    return rows


def mlp(config: ModelConfig, layer: Layer, x: Tensor, lora: LayerAdapter) -> Tensor:
    """The gated feed-forward of `x [N, E]`, its norm included, without the residual."""
    both = project(rms_norm(x, layer.mlp_norm, config.norm_eps), layer.gate_up, lora.gate_up)
    if lora.down is not None:
        return lora.down.multiply(both, require_tensor(layer.down), passes_gate=True)
    return matmul(swiglu(both), layer.down)


def compute_rope(config: ModelConfig, where: Tensor, like: Tensor) -> Rope:
    """Cosines and sines [N, 1, D] of the rotary embedding at positions `where [N]`, as `like` is stored."""
    which = where // _TABLE_POSITIONS
    needed = sorted({int(index) for index in which})
    tables = [_rope_table(config, index * _TABLE_POSITIONS) for index in needed]
    place = torch.searchsorted(torch.tensor(needed), which) * _TABLE_POSITIONS + where % _TABLE_POSITIONS
    cos, sin = (torch.cat([table[i] for table in tables])[place, None] for i in (0, 1))
    return cos.to(like), sin.to(like)


@lru_cache(maxsize=128)
def _rope_table(config: ModelConfig, start: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1024, D] from position `start`: pieces of one size, so that no bit depends on the request."""
    frequencies = torch.tensor(config.inverse_frequencies(), dtype=torch.float32)
    angles = torch.arange(start, start + _TABLE_POSITIONS, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * config.rope_amplitude, angles.sin() * config.rope_amplitude
