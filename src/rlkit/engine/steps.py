"""One new position of many rows, through all layers of a model that is served.

Invariant: what is computed of a row depends on that row only, bit for bit, and not on which way it goes: with a lane of
one thread a layer is two compiled calls and its attention, otherwise one for each operation, so that threads share it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlkit.engine import kernels
from rlkit.engine.config import ModelConfig
from rlkit.engine.lora import LayerAdapter
from rlkit.engine.model import attended, mlp, project_qkv
from rlkit.engine.ops import Rope, rms_norm
from rlkit.engine.products import Packed
from rlkit.engine.weights import Layer, Weights

type Attend = Callable[[int, Tensor, Tensor], None]
"""Called once a layer: its index, queries, keys and values [N, H + 2K, D], and where the result goes, [N, H · D]."""


class Steps:
    """The layers of `weights`, which are made for sampling."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        arrays = [_arrays(weights.config, layer) for layer in weights.layers]
        self._arrays = [layer for layer in arrays if layer is not None]

    def run(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Hidden states after the final norm, [N, E], of embeddings `x [N, E]`, which are used up."""
        weights, config = self._weights, self._weights.config
        mixed = x.new_zeros(len(x), config.heads * config.head_dim)
        if self._arrays and torch.get_num_threads() == 1:
            self._run_compiled(x, rope, attend, mixed)
        else:
            for index, layer in enumerate(weights.layers):
                attend(index, project_qkv(config, layer, x, rope), mixed)
                x = attended(layer, x, mixed, LayerAdapter.none())
                x = x + mlp(config, layer, x, LayerAdapter.none())
        return rms_norm(x, weights.norm, config.norm_eps)

    def _run_compiled(self, x: Tensor, rope: Rope, attend: Attend, mixed: Tensor) -> None:
        """Change `x` to what it is after the last layer."""
        config = self._weights.config
        qkv = x.new_empty(len(x), config.heads + 2 * config.kv_heads, config.head_dim)
        stream, found, mix, turns = x.numpy(), qkv.numpy(), mixed.numpy(), torch.stack(rope)[:, :, 0].numpy()
        for index, (arrays, layer) in enumerate(zip(self._arrays, self._weights.layers, strict=True)):
            kernels.before_attention(arrays, stream, config.kv_heads, turns if layer.rotary else turns[:0], found)
            attend(index, qkv, mixed)
            kernels.after_attention(arrays, stream, mix)


def _arrays(config: ModelConfig, layer: Layer) -> kernels.LayerArrays | None:
    """A layer for the kernels, if its weights are packed for them."""
    packed = [weight for weight in (layer.qkv, layer.o, layer.gate_up, layer.down) if isinstance(weight, Packed)]
    if not packed:
        return None
    qkv, o, gate_up, down = (weight.panels for weight in packed)
    norms = [weight.numpy() for weight in (layer.q_norm, layer.k_norm) if weight is not None]
    return kernels.LayerArrays(
        eps=np.float32(config.norm_eps),
        attention_norm=layer.attention_norm.numpy(),
        qkv=qkv,
        qkv_bias=_vector(layer.qkv_bias),
        head_norms=np.stack(norms) if norms else np.zeros((0, config.head_dim), np.float32),
        o=o,
        o_bias=_vector(layer.o_bias),
        mlp_norm=layer.mlp_norm.numpy(),
        gate_up=gate_up,
        down=down,
    )


def _vector(bias: Tensor | None) -> NDArray[np.float32]:
    return np.zeros(0, np.float32) if bias is None else bias.numpy()
