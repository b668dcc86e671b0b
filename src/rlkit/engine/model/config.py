"""Architecture of a model, read from its directory.

Invariant: a `ModelConfig` describes a model that `rlkit.engine.model.transformer` computes exactly. Other models raise
an error that names the unsupported option, before any weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from rlkit._util.files.model_fields import COUNT, FLAG, INTEGERS, NUMBER, SIZE, SIZE_MAX, Fields, as_list, read_json
from rlkit.engine.model.rotary import AttentionKind, read_rotation
from rlkit.errors import UsageError, did_you_mean

_SLIDING = "sliding_attention"

type Activation = Literal["silu", "gelu"]
"""Activation of the gate in a feed-forward; `gelu` is its approximation by tanh."""
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}


@dataclass(frozen=True, slots=True)
class _Family:
    """Differences of an architecture from Llama, and defaults of its config.json."""

    qk_norm: bool = False
    qkv_bias: bool = False
    fused: bool = False
    unrotated_layers: bool = False
    slides: Literal["never", "if used", "all if used", "always", "five of six"] = "if used"
    """Layers with a sliding window: `if used` is by `use_sliding_window`."""
    sliding_window: int | None = 4096
    activation_field: str = "hidden_act"
    has_experts: bool = False
    has_delta_nets: bool = False
    """Most layers have a gated delta net. Attention has an output gate and rotates a part; norms are stored minus 1."""
    is_gemma: bool = False
    """Norms are stored minus 1 and also follow attention and feed-forward, and embeddings are scaled by √hidden."""
    head_dim: int | None = None
    grouped: bool = True
    """config.json must have `num_key_value_heads`, which otherwise defaults to the number of query heads."""
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    local_theta: float | None = None
    """Base of the rotary embedding in layers with a sliding window, if it is another."""
    tied: bool = False


_QWEN3_5 = _Family(qk_norm=True, slides="never", has_delta_nets=True, head_dim=256)
_FAMILIES = {
    "Gemma3ForCausalLM": _Family(
        qk_norm=True,
        slides="five of six",
        activation_field="hidden_activation",
        is_gemma=True,
        head_dim=256,
        rope_theta=1_000_000.0,
        local_theta=10_000.0,
        tied=True,
    ),
    "LlamaForCausalLM": _Family(slides="never", grouped=False),
    "MistralForCausalLM": _Family(slides="always"),
    "Phi3ForCausalLM": _Family(fused=True, slides="always", sliding_window=None, grouped=False, norm_eps=1e-5),
    "Qwen2ForCausalLM": _Family(qkv_bias=True),
    "Qwen3ForCausalLM": _Family(qk_norm=True, head_dim=128),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3MoeForCausalLM": _Family(qk_norm=True, slides="all if used", has_experts=True),
    "SmolLM3ForCausalLM": _Family(unrotated_layers=True, sliding_window=None, rope_theta=2_000_000.0, tied=True),
}
ARCHITECTURES = tuple(_FAMILIES)
# By `attention_bias`.
_MAY_HAVE_BIAS = {"LlamaForCausalLM", "SmolLM3ForCausalLM", *(name for name in _FAMILIES if name.startswith("Qwen3"))}


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Feed-forwards of a mixture of experts."""

    count: int
    active: int  # experts of a token
    intermediate_size: int
    renormalises: bool  # the weights of the active experts are divided by their sum
    layers: frozenset[int]  # layers with experts; others have one feed-forward


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Gated delta nets, the linear attention of some layers."""

    key_heads: int
    value_heads: int  # a multiple of `key_heads`; consecutive ones share a key head
    key_dim: int
    value_dim: int
    kernel: int  # positions of the convolution
    layers: frozenset[int]  # layers with a delta net; others have attention

    @property
    def channels(self) -> int:
        """Width of queries, keys and values together, which the convolution mixes."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def widths(self) -> dict[str, int]:
        """Widths of the input projections, by their names, in the order of `Layer.qkv`."""
        gates = self.value_heads * self.value_dim
        return {"qkv": self.channels, "z": gates, "b": self.value_heads, "a": self.value_heads}

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state in one layer."""
        return self.value_heads * self.key_dim * self.value_dim + (self.kernel - 1) * self.channels


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    attention: tuple[AttentionKind, ...]  # of each layer; without effect where `delta` has the layer
    activation: Activation
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool  # the output projection of the attention has a bias
    fused: bool  # the files store query, key and value as one matrix, and gate and up as one matrix
    out_norms: bool  # the outputs of attention and feed-forward have norms of their own
    norm_offset: float  # added to the stored numbers of norms
    query_factor: float  # queries are multiplied by it after their norm, beside the usual 1 / √head_dim
    embedding_factor: float  # embeddings are multiplied by it
    experts: ExpertConfig | None
    delta: DeltaConfig | None
    max_positions: int
    eos: frozenset[int]  # tokens that end a generation, from config.json and generation_config.json together

    def find_experts(self, layer: int) -> ExpertConfig | None:
        """Return the experts of a layer, or None if it has one feed-forward."""
        return self.experts if self.experts and layer in self.experts.layers else None

    def find_delta_net(self, layer: int) -> DeltaConfig | None:
        """Return the delta net of a layer, or None if it has attention."""
        return self.delta if self.delta and layer in self.delta.layers else None

    @property
    def kv_layers(self) -> int:
        """Number of layers with attention."""
        return self.layers - (len(self.delta.layers) if self.delta else 0)

    @property
    def qkv_widths(self) -> dict[str, int]:
        """Widths of the projections of queries (each head's with its gate, if it has one), keys and values."""
        key = self.kv_heads * self.head_dim
        return {"q": (2 if self.delta else 1) * self.heads * self.head_dim, "k": key, "v": key}


def read_config(directory: Path) -> ModelConfig:
    """Read the configuration in `directory`; raise `UsageError` for a model that the engine cannot compute."""
    path = directory / "config.json"
    raw = Fields(path, read_json(path))
    architecture = next((str(name) for name in as_list(raw.raw.get("architectures"))), "none")
    if architecture == "Qwen3_5ForConditionalGeneration" and (text := raw.section("text_config")):
        raw = Fields(path, {**text.raw, **raw.raw})  # the fields outside of the section describe images
    family = _FAMILIES.get(architecture)
    if family is None:
        raise UsageError(
            f"{path}: the embedded engine cannot run the architecture {architecture!r}; it supports "
            f"{', '.join(ARCHITECTURES)}.{did_you_mean(architecture, ARCHITECTURES)} "
            "Use a Tinker service (set TINKER_BASE_URL) for other models."
        )
    _check_variants(raw, family)
    heads, hidden = raw.read("num_attention_heads", SIZE), raw.read("hidden_size", SIZE)
    kv_heads = raw.read("num_key_value_heads", SIZE, None if family.grouped else heads)
    head_dim = raw.read("head_dim", SIZE, family.head_dim or hidden // heads)
    if heads % kv_heads:
        raise UsageError(f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise UsageError(f"{path}: head_dim {head_dim} is odd, so its dimensions cannot be rotated in pairs")
    biased = architecture in _MAY_HAVE_BIAS and raw.read("attention_bias", FLAG, default=False)
    scalar = raw.read("query_pre_attn_scalar", NUMBER, 256.0) if family.is_gemma else float(head_dim)
    generation = directory / "generation_config.json"
    eos = _read_eos(raw.raw) | (_read_eos(read_json(generation)) if generation.exists() else frozenset[int]())
    return ModelConfig(
        vocab_size=raw.read("vocab_size", SIZE),
        hidden_size=hidden,
        intermediate_size=raw.read("intermediate_size", SIZE),
        layers=raw.read("num_hidden_layers", SIZE),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=raw.read("rms_norm_eps", NUMBER, family.norm_eps),
        attention=_read_attention(raw, family, head_dim),
        activation=_ACTIVATIONS[_read_activation(raw, family)],
        tied=raw.read("tie_word_embeddings", FLAG, family.tied),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or biased,
        o_bias=biased,
        fused=family.fused,
        out_norms=family.is_gemma,
        norm_offset=float(family.is_gemma or family.has_delta_nets),
        query_factor=math.sqrt(head_dim / scalar),
        embedding_factor=math.sqrt(hidden) if family.is_gemma else 1.0,
        experts=_read_experts(raw) if family.has_experts else None,
        delta=_read_delta(raw) if family.has_delta_nets else None,
        max_positions=raw.read("max_position_embeddings", SIZE),
        eos=eos,
    )


def find_weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files in `directory`: the files of its index, or `model.safetensors`, or all."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.exists():
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{directory} has no .safetensors file: the embedded engine reads no other format")
        return files
    weight_map = Fields(index, read_json(index)).section("weight_map")
    names = sorted({str(name) for name in weight_map.raw.values()}) if weight_map else []
    if not names or any(Path(name).name != name for name in names):
        raise UsageError(f"{index}: weight_map must give a file of this directory for each tensor")
    for name in names:
        if not (directory / name).is_file():
            raise UsageError(f"{directory} lacks {name}, which {index.name} lists: download the model again")
    return [directory / name for name in names]


def _check_variants(config: Fields, family: _Family) -> None:
    """Raise `UsageError` for options that the engine does not support."""
    raw = config.raw
    quantisation = config.section("quantization_config")
    if quantisation is not None:
        method = quantisation.raw.get("quant_method", "an unnamed method")
        raise UsageError(
            f"{config.path}: weights quantised with {method} (quantization_config) are not supported by the embedded "
            "engine; use the unquantised model or a GGUF file"
        )
    unsupported = {
        family.activation_field: _read_activation(config, family) not in _ACTIVATIONS,
        "mlp_bias": config.read("mlp_bias", FLAG, default=False),
    }
    if family.has_delta_nets:  # the activation after the convolution is SiLU anyway
        unsupported["hidden_act"] = _ACTIVATIONS.get(_read_activation(config, family)) != "silu"
    if family.is_gemma:
        names = ("attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
        unsupported |= {name: bool(raw.get(name)) for name in names}
    for name in (name for name, is_unsupported in unsupported.items() if is_unsupported):
        raise UsageError(f"{config.path}: {name} = {raw.get(name)!r} is not supported by the embedded engine")


def _read_activation(config: Fields, family: _Family) -> str:
    return str(config.raw.get(family.activation_field) or ("gelu_pytorch_tanh" if family.is_gemma else "silu"))


def _read_attention(config: Fields, family: _Family, head_dim: int) -> tuple[AttentionKind, ...]:
    """Read the rotary embedding and the sliding window of each layer."""
    layers = config.read("num_hidden_layers", SIZE)
    unrotated = _read_unrotated(config, layers) if family.unrotated_layers else frozenset[int]()
    parameters, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    local = None
    if parameters is not None and family.local_theta is not None:
        parameters, local = parameters.section("full_attention"), parameters.section("sliding_attention")
    if parameters and scaling and not scaling.raw.items() <= parameters.raw.items():
        raise UsageError(f"{config.path}: rope_parameters and rope_scaling contradict each other: remove one of them")
    read = partial(read_rotation, config=config, head_dim=head_dim, is_partial=family.has_delta_nets)
    kind = sliding_kind = read(parameters or scaling, base="rope_theta", default_base=family.rope_theta)
    if family.local_theta is not None:
        sliding_kind = read(local, base="rope_local_base_freq", default_base=family.local_theta)
    slides = _read_sliding_layers(config, family, layers, unrotated)
    window = config.read("sliding_window", SIZE, family.sliding_window) if slides else SIZE_MAX
    if window < config.read("max_position_embeddings", SIZE):
        sliding_kind = replace(sliding_kind, window=window)
    kinds = [sliding_kind if index in slides else kind for index in range(layers)]
    still = (0.0,) * (head_dim // 2)
    return tuple(replace(kind, frequencies=still) if index in unrotated else kind for index, kind in enumerate(kinds))


def _read_sliding_layers(
    config: Fields, family: _Family, layers: int, unrotated: frozenset[int]
) -> frozenset[int] | range:
    """Read the layers with a sliding window."""
    if family.slides == "never":
        return range(0)
    is_used = family.slides in ("always", "five of six") or config.read("use_sliding_window", FLAG, default=False)
    has_window = is_used and config.raw.get("sliding_window", family.sliding_window) is not None
    if family.slides in ("always", "all if used"):
        return range(layers if has_window else 0)
    sliding = _read_marks(config, "layer_types", (_SLIDING, "full_attention"), layers)
    if sliding is None and family.slides == "five of six":
        sliding = frozenset(range(layers)) - _read_interval(config, "sliding_window_pattern", 6)
    if sliding is None and has_window:
        return unrotated if family.unrotated_layers else range(config.read("max_window_layers", COUNT, 28), layers)
    if sliding and not has_window:
        name = "sliding_window" if is_used else "use_sliding_window"
        raise UsageError(f"{config.path}: {name} = {config.raw.get(name)!r}, but layers have a sliding window: set it")
    return sliding or range(0)


def _read_experts(config: Fields) -> ExpertConfig | None:
    dense = config.read("mlp_only_layers", INTEGERS, [])
    count = config.read("num_experts", SIZE, config.read("num_local_experts", SIZE, 128))
    active = config.read("num_experts_per_tok", SIZE, 8)
    if active > count:
        raise UsageError(f"{config.path}: num_experts_per_tok {active} is greater than the number of experts, {count}")
    return ExpertConfig(
        count=count,
        active=active,
        intermediate_size=config.read("moe_intermediate_size", SIZE),
        renormalises=config.read("norm_topk_prob", FLAG, default=False),
        layers=_read_interval(config, "decoder_sparse_step", 1) - {*dense},
    )


def _read_delta(config: Fields) -> DeltaConfig:
    layers = config.read("num_hidden_layers", SIZE)
    linear = _read_marks(config, "layer_types", ("linear_attention", "full_attention"), layers)
    if linear is None:
        linear = frozenset(range(layers)) - _read_interval(config, "full_attention_interval", 4)
    if len(linear) == layers:
        raise UsageError(f"{config.path}: a model without a layer of full attention (layer_types) is not supported")
    keys, values = config.read("linear_num_key_heads", SIZE, 16), config.read("linear_num_value_heads", SIZE, 32)
    if values % keys:
        raise UsageError(
            f"{config.path}: linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}"
        )
    return DeltaConfig(
        key_heads=keys,
        value_heads=values,
        key_dim=config.read("linear_key_head_dim", SIZE, 128),
        value_dim=config.read("linear_value_head_dim", SIZE, 128),
        kernel=config.read("linear_conv_kernel_dim", SIZE, 4),
        layers=linear,
    )


def _read_unrotated(config: Fields, layers: int) -> frozenset[int]:
    """Read the layers without rotary embedding: zeros of SmolLM3's `no_rope_layers`, by default every fourth."""
    unrotated = _read_marks(config, "no_rope_layers", (0, 1), layers)
    return _read_interval(config, "no_rope_layer_interval", 4) if unrotated is None else unrotated


def _read_interval(config: Fields, name: str, default: int) -> frozenset[int]:
    """Read an interval, and return the last layer of each."""
    interval = config.read(name, SIZE, default)
    return frozenset(range(interval - 1, config.read("num_hidden_layers", SIZE), interval))


def _read_marks(config: Fields, name: str, marks: tuple[object, object], layers: int) -> frozenset[int] | None:
    """Read the layers with the first of two marks in a list of marks; None if the field is absent or null."""
    if config.raw.get(name) is None:
        return None
    values = as_list(config.raw[name])
    if len(values) != layers or any(value not in marks for value in values):
        raise UsageError(f"{config.path}: {name} must have {marks[0]!r} or {marks[1]!r} for each of {layers} layers")
    return frozenset(index for index, value in enumerate(values) if value == marks[0])


def _read_eos(raw: Mapping[str, object]) -> frozenset[int]:
    return frozenset[int](token for token in as_list(raw.get("eos_token_id")) if isinstance(token, int))
