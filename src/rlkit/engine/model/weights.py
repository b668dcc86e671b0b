"""Frozen weights of a model, in a layout for fast products.

Invariant: weights are never changed in place. Matrices that are bfloat16 in the files stay bfloat16 in memory.

Matrices are [in, out], so that a product is `x @ w`; query, key and value are one matrix, as are gate and up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlkit.engine.model.config import ModelConfig, find_weight_files, read_config
from rlkit.engine.model.matrices import Matrix, pack
from rlkit.engine.model.rotary import AttentionKind
from rlkit.errors import UsageError

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Expert:
    """The feed-forward of an expert."""

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One decoder layer; H query heads, K key/value heads of size D, hidden size E, intermediate size I."""

    attention_norm: Tensor  # [E]
    qkv: Matrix  # [E, (H + 2K) · D]
    qkv_bias: Tensor | None  # [(H + 2K) · D], or None
    q_norm: Tensor | None  # [D], or None without QK-norm; `k_norm` alike
    k_norm: Tensor | None
    attention: AttentionKind
    o: Matrix  # [H · D, E]
    o_bias: Tensor | None  # [E], or None
    attention_out_norm: Tensor | None  # [E], a norm of attention's output, or None; `mlp_out_norm` alike
    mlp_norm: Tensor  # [E]
    gate_up: Matrix | None  # [E, 2I]; None if the layer has experts; `down` alike
    down: Matrix | None  # [I, E]
    router: Matrix | None  # [E, experts], or None
    experts: tuple[Expert, ...]
    mlp_out_norm: Tensor | None


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of a model."""

    config: ModelConfig
    embedding: Tensor  # [V, E]
    layers: tuple[Layer, ...]
    norm: Tensor  # [E], the final norm; activations have its type and device
    output: Matrix  # [E, V], the output layer; made from the embedding if the configuration ties them

    @property
    def attention_kinds(self) -> list[AttentionKind]:
        """Distinct kinds of attention of the layers."""
        return list(dict.fromkeys(layer.attention for layer in self.layers))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [N, E] of `tokens [N]`, scaled as the architecture says."""
        rows = self.embedding[tokens].to(self.norm.dtype)
        # The factor is rounded to the type of the activations, as in transformers.
        return rows if self.config.embedding_factor == 1 else rows * rows.new_tensor(self.config.embedding_factor)


def load_weights(directory: Path, device: torch.device | str = "cpu", *, quantisation: str | None = None) -> Weights:
    """Read `directory` (config.json, *.safetensors) onto a device.

    On the CPU, matrices keep the type bfloat16, and everything else becomes float32. Elsewhere everything is bfloat16.

    Args:
        quantisation: one of `QUANTISATIONS`, for the matrices of the layers.
    """
    config = read_config(directory)
    read = _TensorReader(directory, torch.device(device))
    if quantisation is not None and torch.device(device).type != "cpu":
        raise UsageError(f"base weights in {quantisation} need the device cpu: use the model without @{quantisation}")
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = read("model.embed_tokens.weight", vocab, hidden)
    output = pack(embedding if config.tied else read("lm_head.weight", vocab, hidden))
    layers = tuple(_read_layer(read, config, index, quantisation) for index in range(config.layers))
    return Weights(config, embedding, layers, read("model.norm.weight", hidden) + config.norm_offset, output)


def _read_layer(read: _TensorReader, config: ModelConfig, index: int, quantisation: str | None) -> Layer:
    prefix, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
    attention, size = f"{prefix}.self_attn", config.head_dim
    experts = config.expert_count(index)
    expert_inner = config.experts.intermediate_size if config.experts else 0
    widths = {"q": config.heads * size, "k": config.kv_heads * size, "v": config.kv_heads * size}

    def join(parts: list[Tensor]) -> Matrix:
        matrix = pack(torch.cat(parts), quantisation)
        return matrix.contiguous() if isinstance(matrix, Tensor) else matrix

    def stacked(stem: str, fused: str, parts: dict[str, int]) -> Matrix:
        widths_by_name = {fused: sum(parts.values())} if config.fused else parts
        return join([read(f"{stem}.{name}_proj.weight", width, hidden) for name, width in widths_by_name.items()])

    def gate_up(name: str, inner: int) -> Matrix:
        return stacked(f"{prefix}.{name}", "gate_up", {"gate": inner, "up": inner})

    def down(name: str, inner: int) -> Matrix:
        return join([read(f"{prefix}.{name}.down_proj.weight", hidden, inner)])

    def norm(name: str, width: int = hidden) -> Tensor:
        return read(f"{prefix}.{name}.weight", width) + config.norm_offset

    return Layer(
        attention_norm=norm("input_layernorm"),
        qkv=stacked(attention, "qkv", widths),
        qkv_bias=torch.cat([read(f"{attention}.{n}_proj.bias", width) for n, width in widths.items()])
        if config.qkv_bias
        else None,
        q_norm=norm("self_attn.q_norm", size) * config.query_factor if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", size) if config.qk_norm else None,
        attention=config.attention[index],
        o=join([read(f"{attention}.o_proj.weight", hidden, config.heads * size)]),
        o_bias=read(f"{attention}.o_proj.bias", hidden) if config.o_bias else None,
        attention_out_norm=norm("post_attention_layernorm") if config.out_norms else None,
        mlp_norm=norm("pre_feedforward_layernorm" if config.out_norms else "post_attention_layernorm"),
        gate_up=None if experts else gate_up("mlp", inner),
        down=None if experts else down("mlp", inner),
        router=pack(read(f"{prefix}.mlp.gate.weight", experts, hidden)) if experts else None,
        experts=tuple(
            Expert(gate_up(f"mlp.experts.{i}", expert_inner), down(f"mlp.experts.{i}", expert_inner))
            for i in range(experts)
        ),
        mlp_out_norm=norm("post_feedforward_layernorm") if config.out_norms else None,
    )


class _TensorReader:
    """Reader of tensors by name from all safetensors files of a directory."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._directory = directory
        self._device = device
        self._read: dict[str, Callable[[str], Tensor]] = {}
        for path in find_weight_files(directory):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UsageError(f"{path}: not a readable safetensors file; download it again ({error})") from error
            names = cast("list[str]", file.keys())
            self._read |= dict.fromkeys(names, cast("Callable[[str], Tensor]", file.get_tensor))

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name not in self._read:
            raise UsageError(f"{self._directory}: the weights have no tensor {name!r}, which config.json requires")
        tensor = self._read[name](name)
        if tuple(tensor.shape) != shape:
            raise UsageError(f"{self._directory}: {name} has shape {tuple(tensor.shape)}, config.json says {shape}")
        if tensor.dtype not in _DTYPES:
            raise UsageError(f"{self._directory}: {name} has the type {tensor.dtype}, which is not supported")
        is_stored = tensor.dtype == torch.bfloat16 and len(shape) > 1
        return tensor.to(self._device, torch.bfloat16 if is_stored or self._device.type != "cpu" else torch.float32)
