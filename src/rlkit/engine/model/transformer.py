"""Forward pass of a decoder over packed sequences.

Invariant: with packed weights in float32 on the CPU, the results of a sequence depend only on its tokens and the
weights, bit for bit, and not on other sequences in the batch.

In a packed batch the sequences are consecutive in `tokens [N]`, as spans of `rlkit.engine.model.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType] torch types it partly

from rlkit.engine.model.attention import Attention, Span, positions
from rlkit.engine.model.config import ModelConfig
from rlkit.engine.model.delta_net import DeltaState
from rlkit.engine.model.lora import NO_ADAPTER, Adapter, LayerAdapter, Lora
from rlkit.engine.model.matrices import Matrix, matmul, multiply_rows
from rlkit.engine.model.ops import Rope, glu, multiply_by_sigmoid, rms_norm, split_heads
from rlkit.engine.model.rotary import AttentionKind
from rlkit.engine.model.weights import Expert, Layer, Weights

_TABLE_POSITIONS = 1024
# A training step stores about a megabyte per token for the backward pass of a small model. Beyond this many tokens it
# stores only each layer's input and recomputes the rest: a third slower, with a twentieth of the memory.
_KEEP_ALL_TOKENS = {"cpu": 1024, "cuda": 16_384}

type StoreKv = Callable[[int, Tensor], None]
"""Called once per layer with attention, with its index among them, and keys and values [N, 2K, D]."""

type Mix = Callable[[Layer, Tensor], Tensor]
"""Function that computes a layer's attention or delta net.

It maps queries and keys (not rotated) and values [N, H + 2K, D], or the projections of a delta net, to [N, …].
"""

type LoadKv = Callable[[int], Tensor]
"""Function from a layer's index among those with attention to keys and values of prefixes, [M, 2K, D]."""


def compute_hidden(
    weights: Weights,
    tokens: Tensor,
    spans: Sequence[Span],
    *,
    adapter: Adapter | None = None,
    store_kv: StoreKv | None = None,
    load_kv: LoadKv | None = None,
    states: Sequence[Sequence[DeltaState]] = (),
    state_spans: Sequence[Span] = (),
) -> Tensor:
    """Return hidden states after the final norm, [N, E], of `tokens [N] int64`; rows outside all spans are padding.

    Args:
        load_kv: where the spans' prefixes are; by default in `tokens`.
        states: each span's states in the layers with a delta net, changed in place; by default those after its prefix.
        state_spans: spans of the states, with prefixes among them; by default `spans`.
    """
    config = weights.config
    x = weights.embed(tokens)
    where = positions(spans, len(tokens))
    attentions = {
        kind: Attention(spans, compute_rope(kind, where, x), config.kv_heads, kind.window)
        for kind in weights.attention_kinds
    }

    def mix(layer: Layer, rows: Tensor) -> Tensor:
        if layer.delta is not None:
            return layer.delta(rows, state_spans or spans, [by_layer[layer.slot] for by_layer in states])
        mixed, rows = attentions[layer.attention](rows, prefix_rows=None if load_kv is None else load_kv(layer.slot))
        if store_kv is not None:
            store_kv(layer.slot, rows[:, config.heads :])
        return mixed

    recompute = torch.is_grad_enabled() and len(tokens) > _KEEP_ALL_TOKENS[tokens.device.type]
    for index, layer in enumerate(weights.layers):
        run = partial(run_layer, config, layer, mix=mix, lora=adapter.layer(index) if adapter else NO_ADAPTER)
        x = checkpoint(run, x, use_reentrant=False) if recompute else run(x)
    return rms_norm(x, weights.norm, config.norm_eps)


def run_layer(config: ModelConfig, layer: Layer, x: Tensor, *, mix: Mix, lora: LayerAdapter = NO_ADAPTER) -> Tensor:
    """Return the output of a layer, [N, E], of `x [N, E]`."""
    rows, gate = project(rms_norm(x, layer.attention_norm, config.norm_eps), layer.qkv, lora.qkv), None
    if layer.delta is None:
        rows, gate = _split_qkv(config, layer, rows)
    mixed = mix(layer, rows)
    y = project(mixed if gate is None else multiply_by_sigmoid(mixed, gate), layer.o, lora.o)
    if layer.attention_out_norm is not None:
        y = rms_norm(y, layer.attention_out_norm, config.norm_eps)
    x = x + y if layer.o_bias is None else x + y + layer.o_bias
    return x + _run_mlp(config, layer, x, lora)


def project(x: Tensor, weight: Matrix, lora: Lora | None) -> Tensor:
    """Return `x @ weight`, plus the low-rank term of the adapter, if any."""
    if lora is not None:
        return lora.multiply(x, weight)
    return multiply_rows(x, weight) if x.requires_grad else matmul(x, weight)


def _split_qkv(config: ModelConfig, layer: Layer, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return queries and keys (not rotated) and values, [N, H + 2K, D]; and the output gate [N, H · D], or None."""
    if layer.qkv_bias is not None:
        rows = rows + layer.qkv_bias
    rows, gate = rows.view(len(rows), -1, config.head_dim), None
    if config.delta:  # each head's is after its query
        q, gate = rows[:, : 2 * config.heads].reshape(len(rows), config.heads, 2, -1).unbind(2)
        rows, gate = torch.cat([q, rows[:, 2 * config.heads :]], 1), gate.flatten(1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k, v = split_heads(rows, config.kv_heads)
        q, k = rms_norm(q, layer.q_norm, config.norm_eps), rms_norm(k, layer.k_norm, config.norm_eps)
        rows = torch.cat([q, k, v], 1)
    return rows, gate


def _run_mlp(config: ModelConfig, layer: Layer, x: Tensor, lora: LayerAdapter) -> Tensor:
    """Return the norms and gated feed-forward of `x [N, E]`, without the residual."""
    x = rms_norm(x, layer.mlp_norm, config.norm_eps)
    y = _mix_experts(config, layer, x, lora) if layer.experts else _feed_forward(config, layer, x, lora)
    return y if layer.mlp_out_norm is None else rms_norm(y, layer.mlp_out_norm, config.norm_eps)


def _feed_forward(config: ModelConfig, part: Layer | Expert, x: Tensor, lora: LayerAdapter) -> Tensor:
    assert part.gate_up is not None
    assert part.down is not None
    gate_up = project(x, part.gate_up, lora.gate_up)
    if lora.down is not None:
        return lora.down.multiply(gate_up, part.down, gate=config.activation)
    return project(glu(gate_up, config.activation), part.down, None)


def _mix_experts(config: ModelConfig, layer: Layer, x: Tensor, lora: LayerAdapter) -> Tensor:
    """Return the sum of the feed-forwards of the likeliest experts of each row of `x [N, E]`, by their weights."""
    assert config.experts is not None
    assert layer.router is not None
    logits = project(x, layer.router, None).float()
    top, chosen = logits.topk(config.experts.active, -1)
    # A softmax of the chosen logits is that of all logits, divided by the sum of the chosen.
    shares = torch.softmax(top, -1) if config.experts.renormalises else torch.softmax(logits, -1).gather(-1, chosen)
    y = torch.zeros_like(x)
    for index, expert in enumerate(layer.experts):
        rows, places = (chosen == index).nonzero().unbind(-1)
        if len(rows):
            part = _feed_forward(config, expert, x[rows], lora.experts[index] if lora.experts else NO_ADAPTER)
            y = y.index_add(0, rows, part * shares[rows, places, None].to(x.dtype))
    return y


def compute_rope(kind: AttentionKind, row_positions: Tensor, template: Tensor) -> Rope:
    """Return cosines and sines [N, 1, D] at `row_positions [N]`, with the device and type of `template`."""
    table_indices = row_positions // _TABLE_POSITIONS
    distinct = sorted({int(index) for index in table_indices})
    tables = [_rope_table(kind, index * _TABLE_POSITIONS) for index in distinct]
    table_rows = (
        torch.searchsorted(torch.tensor(distinct), table_indices) * _TABLE_POSITIONS + row_positions % _TABLE_POSITIONS
    )
    cos, sin = (torch.cat([table[i] for table in tables])[table_rows, None] for i in (0, 1))
    return cos.to(template), sin.to(template)


@lru_cache(maxsize=128)
def _rope_table(kind: AttentionKind, start: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [1024, D] from `start`; tables of one size keep the bits equal for all requests."""
    places = torch.arange(start, start + _TABLE_POSITIONS, dtype=torch.float32)
    angles = places[:, None] * torch.tensor(kind.frequencies, dtype=torch.float32)
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * kind.amplitude, angles.sin() * kind.amplitude
