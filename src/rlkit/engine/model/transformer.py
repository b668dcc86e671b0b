"""Forward pass of a dense decoder over packed sequences.

Invariant: with packed weights in float32 on the CPU, the results of a sequence depend only on its tokens and the
weights, bit for bit, and not on other sequences in the batch.

In a packed batch the sequences are consecutive in `tokens [N]`, as spans of `rlkit.engine.model.attention`.
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
from rlkit.engine.model.matrices import Matrix, matmul, multiply_rows
from rlkit.engine.model.ops import Rope, rms_norm, split_heads, swiglu
from rlkit.engine.model.weights import Layer, Weights

_TABLE_POSITIONS = 1024
# A training step stores about a megabyte per token for the backward pass of a small model. Beyond this many tokens it
# stores only each layer's input and recomputes the rest: a third slower, with a twentieth of the memory.
_KEEP_ALL_TOKENS = {"cpu": 1024, "cuda": 16_384}

type StoreKv = Callable[[int, Tensor], None]
"""Called once per layer with its index, and keys and values [N, 2K, D]."""

type LoadKv = Callable[[int], Tensor]
"""Function from a layer's index to keys and values of prefixes, [M, 2K, D]."""


def compute_hidden(
    weights: Weights,
    tokens: Tensor,
    spans: Sequence[Span],
    *,
    adapter: Adapter | None = None,
    store_kv: StoreKv | None = None,
    load_kv: LoadKv | None = None,
) -> Tensor:
    """Return hidden states after the final norm, [N, E], of `tokens [N] int64`; rows outside all spans are padding.

    Args:
        load_kv: where the spans' prefixes are; by default in `tokens`.
    """
    config = weights.config
    x = weights.embed(tokens)
    attention = Attention(spans, compute_rope(config, positions(spans, len(tokens)), x), config.kv_heads)

    def run_layer(index: int, x: Tensor) -> Tensor:
        layer = weights.layers[index]
        lora = adapter.layer(index) if adapter else NO_ADAPTER
        prefix_rows = None if load_kv is None else load_kv(index)
        qkv = project_qkv(config, layer, x, lora.qkv)
        mixed, rows = attention(qkv, rotary=layer.rotary, prefix_rows=prefix_rows)
        if store_kv is not None:
            store_kv(index, rows[:, config.heads :])
        x = add_attention(layer, x, mixed, lora)
        return x + mlp(config, layer, x, lora)

    recompute = torch.is_grad_enabled() and len(tokens) > _KEEP_ALL_TOKENS[tokens.device.type]
    for index in range(config.layers):
        x = checkpoint(run_layer, index, x, use_reentrant=False) if recompute else run_layer(index, x)
    return rms_norm(x, weights.norm, config.norm_eps)


def project(x: Tensor, weight: Matrix, lora: Lora | None) -> Tensor:
    """Return `x @ weight`, plus the low-rank term of the adapter, if any."""
    if lora is not None:
        return lora.multiply(x, weight)
    return multiply_rows(x, weight) if x.requires_grad else matmul(x, weight)


def add_attention(layer: Layer, x: Tensor, mixed: Tensor, lora: LayerAdapter) -> Tensor:
    """Project attention's output `mixed [N, H · D]` and add it to the residual stream `x [N, E]`."""
    y = x + project(mixed, layer.o, lora.o)
    return y if layer.o_bias is None else y + layer.o_bias


def project_qkv(config: ModelConfig, layer: Layer, x: Tensor, lora: Lora | None = None) -> Tensor:
    """Return queries and keys (not rotated) and values, [N, H + 2K, D]."""
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
    """Return the norm and gated feed-forward of `x [N, E]`, without the residual."""
    gate_up = project(rms_norm(x, layer.mlp_norm, config.norm_eps), layer.gate_up, lora.gate_up)
    if lora.down is not None:
        return lora.down.multiply(gate_up, layer.down, applies_swiglu=True)
    return project(swiglu(gate_up), layer.down, None)


def compute_rope(config: ModelConfig, row_positions: Tensor, template: Tensor) -> Rope:
    """Return cosines and sines [N, 1, D] at `row_positions [N]`, with the device and type of `template`."""
    table_indices = row_positions // _TABLE_POSITIONS
    distinct = sorted({int(index) for index in table_indices})
    tables = [_rope_table(config, index * _TABLE_POSITIONS) for index in distinct]
    table_rows = (
        torch.searchsorted(torch.tensor(distinct), table_indices) * _TABLE_POSITIONS + row_positions % _TABLE_POSITIONS
    )
    cos, sin = (torch.cat([table[i] for table in tables])[table_rows, None] for i in (0, 1))
    return cos.to(template), sin.to(template)


@lru_cache(maxsize=128)
def _rope_table(config: ModelConfig, start: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [1024, D] from `start`; tables of one size keep the bits equal for all requests."""
    frequencies = torch.tensor(config.inverse_frequencies(), dtype=torch.float32)
    angles = torch.arange(start, start + _TABLE_POSITIONS, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * config.rope_amplitude, angles.sin() * config.rope_amplitude
