"""Frozen weights of a model, in a layout for fast products.

Invariant: weights are never changed in place. Matrices that are bfloat16 in the files stay bfloat16 in memory.

Matrices are [in, out], so that a product is `x @ w`; query, key and value are one matrix, as are gate and up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlkit.engine.model.config import DeltaConfig, ModelConfig, find_weight_files, read_config
from rlkit.engine.model.delta_net import DeltaNet, DeltaState
from rlkit.engine.model.matrices import Matrix, pack
from rlkit.engine.model.rotary import AttentionKind
from rlkit.errors import UsageError

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Expert:
    """The feed-forward of an expert."""

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layer:
    """One decoder layer; H query heads, K key/value heads of size D, hidden size E, intermediate size I."""

    attention_norm: Tensor  # [E]
    qkv: Matrix  # [E, (H + 2K) · D], (2H + 2K) · D if attention has an output gate; or `DeltaConfig.widths`
    qkv_bias: Tensor | None = None  # [(H + 2K) · D], or None
    q_norm: Tensor | None = None  # [D], or None without QK-norm; `k_norm` alike
    k_norm: Tensor | None = None
    attention: AttentionKind
    delta: DeltaNet | None = None  # in place of attention, or None
    slot: int  # index among the layers with attention, or among those with a delta net
    o: Matrix  # [H · D, E], or from the outputs of the delta net
    o_bias: Tensor | None = None  # [E], or None
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

    @cached_property
    def attention_kinds(self) -> list[AttentionKind]:
        """Distinct kinds of attention of the layers."""
        return list(dict.fromkeys(layer.attention for layer in self.layers if not layer.delta))

    def make_states(self) -> list[DeltaState]:
        """Return the states of a new sequence, one for each layer with a delta net."""
        return [layer.delta.make_state() for layer in self.layers if layer.delta]

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
    layers = tuple(_read_layer(_LayerReader(read, config, index, quantisation)) for index in range(config.layers))
    return Weights(config, embedding, layers, read("model.norm.weight", hidden) + config.norm_offset, output)


@dataclass(frozen=True, slots=True)
class _LayerReader:
    """Reader of a layer's weights by their names in the layer."""

    read: _TensorReader
    config: ModelConfig
    index: int
    quantisation: str | None

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.read(f"model.layers.{self.index}.{name}", *shape)

    def norm(self, name: str, width: int | None = None) -> Tensor:
        return self.tensor(f"{name}.weight", width or self.config.hidden_size) + self.config.norm_offset

    def matrix(self, stem: str, widths: Mapping[str, int], inner: int | None = None) -> Matrix:
        """Read matrices with the same inputs, by default those of the layer, as one: widths are by name."""
        inner = inner or self.config.hidden_size
        parts = [self.tensor(f"{stem}.{name}.weight", width, inner) for name, width in widths.items()]
        matrix = pack(torch.cat(parts), self.quantisation)
        return matrix.contiguous() if isinstance(matrix, Tensor) else matrix

    def projections(self, stem: str, fused: str, widths: Mapping[str, int]) -> Matrix:
        """Read projections that some files store as one matrix, `fused`."""
        widths = {fused: sum(widths.values())} if self.config.fused else widths
        return self.matrix(stem, {f"{name}_proj": width for name, width in widths.items()})

    def feed_forward(self, stem: str, inner: int) -> tuple[Matrix, Matrix]:
        gate_up = self.projections(stem, "gate_up", {"gate": inner, "up": inner})
        return gate_up, self.matrix(stem, {"down_proj": self.config.hidden_size}, inner)


def _read_layer(read: _LayerReader) -> Layer:
    config, delta, experts = read.config, read.config.find_delta_net(read.index), read.config.find_experts(read.index)
    make_layer = _read_delta_net(read, delta) if delta else _read_attention(read)
    gate_up, down = (None, None) if experts else read.feed_forward("mlp", config.intermediate_size)
    return make_layer(
        attention_norm=read.norm("input_layernorm"),
        attention=config.attention[read.index],
        slot=sum(config.find_delta_net(other) == delta for other in range(read.index)),
        attention_out_norm=read.norm("post_attention_layernorm") if config.out_norms else None,
        mlp_norm=read.norm("pre_feedforward_layernorm" if config.out_norms else "post_attention_layernorm"),
        gate_up=gate_up,
        down=down,
        router=pack(read.tensor("mlp.gate.weight", experts.count, config.hidden_size)) if experts else None,
        experts=tuple(
            Expert(*read.feed_forward(f"mlp.experts.{i}", experts.intermediate_size)) for i in range(experts.count)
        )
        if experts
        else (),
        mlp_out_norm=read.norm("post_feedforward_layernorm") if config.out_norms else None,
    )


def _read_attention(read: _LayerReader) -> partial[Layer]:
    """Read the attention of a layer."""
    config, stem, widths = read.config, "self_attn", read.config.qkv_widths
    biases = [read.tensor(f"{stem}.{n}_proj.bias", width) for n, width in widths.items() if config.qkv_bias]
    return partial(
        Layer,
        qkv=read.projections(stem, "qkv", widths),
        qkv_bias=torch.cat(biases) if biases else None,
        q_norm=read.norm(f"{stem}.q_norm", config.head_dim) * config.query_factor if config.qk_norm else None,
        k_norm=read.norm(f"{stem}.k_norm", config.head_dim) if config.qk_norm else None,
        o=read.matrix(stem, {"o_proj": config.hidden_size}, config.heads * config.head_dim),
        o_bias=read.tensor(f"{stem}.o_proj.bias", config.hidden_size) if config.o_bias else None,
    )


def _read_delta_net(read: _LayerReader, c: DeltaConfig) -> partial[Layer]:
    """Read the delta net of a layer; states are float32 on every device."""
    stem, width = "linear_attn", c.value_heads * c.value_dim
    conv = read.tensor(f"{stem}.conv1d.weight", c.channels, 1, c.kernel)[:, 0].float().t().contiguous()
    decay = -read.tensor(f"{stem}.A_log", c.value_heads).float().exp()
    bias = read.tensor(f"{stem}.dt_bias", c.value_heads).float()
    norm = read.tensor(f"{stem}.norm.weight", c.value_dim)
    return partial(
        Layer,
        qkv=read.matrix(stem, {f"in_proj_{name}": width for name, width in c.widths.items()}),
        delta=DeltaNet(c, conv, decay, bias, norm, read.config.norm_eps),
        o=read.matrix(stem, {"out_proj": read.config.hidden_size}, width),
    )


class _TensorReader:
    """Reader of tensors by name from all safetensors files of a directory."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._directory = directory
        self._device = device
        self._read: dict[str, Callable[[], Tensor]] = {}
        for path in find_weight_files(directory):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UsageError(f"{path}: not a readable safetensors file; download it again ({error})") from error
            get_tensor = cast("Callable[[str], Tensor]", file.get_tensor)
            for name in cast("list[str]", file.keys()):
                # Files of models that also read images have a longer name, and so have text models of Qwen3.5.
                self._read[name.replace("model.language_model.", "model.", 1)] = partial(get_tensor, name)

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name not in self._read:
            raise UsageError(f"{self._directory}: the weights have no tensor {name!r}, which config.json requires")
        tensor = self._read[name]()
        if tuple(tensor.shape) != shape:
            raise UsageError(f"{self._directory}: {name} has shape {tuple(tensor.shape)}, config.json says {shape}")
        if tensor.dtype not in _DTYPES:
            raise UsageError(f"{self._directory}: {name} has the type {tensor.dtype}, which is not supported")
        is_stored = tensor.dtype == torch.bfloat16 and len(shape) > 1
        return tensor.to(self._device, torch.bfloat16 if is_stored or self._device.type != "cpu" else torch.float32)
