"""Architecture of a model, read from its directory.

Invariant: a `ModelConfig` describes a model that `rlkit.engine.model.transformer` computes exactly. Other models raise
an error that names the unsupported option, before any weight is read.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import Field, TypeAdapter, ValidationError

from rlkit.engine.model.rotary import AttentionKind, LinearScaling, Llama3Scaling, YarnScaling
from rlkit.errors import UsageError, did_you_mean

_SIZE_MAX = 2**24  # far above every size of a dense model
_SIZE = TypeAdapter[int](Annotated[int, Field(ge=1, le=_SIZE_MAX)])
_NUMBER = TypeAdapter[float](Annotated[float, Field(gt=0, allow_inf_nan=False)])
_COUNT = TypeAdapter[int](Annotated[int, Field(ge=0, le=_SIZE_MAX)])
_INTEGERS = TypeAdapter(list[int])
_OBJECT = TypeAdapter(dict[str, object])
FLAG = TypeAdapter(bool)
_SLIDING = "sliding_attention"
_SCALINGS = ("default", "linear", "llama3", "yarn")

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
    "Qwen3MoeForCausalLM": _Family(qk_norm=True, slides="all if used", has_experts=True),
    "SmolLM3ForCausalLM": _Family(unrotated_layers=True, sliding_window=None, rope_theta=2_000_000.0, tied=True),
}
ARCHITECTURES = tuple(_FAMILIES)
# By `attention_bias`.
_MAY_HAVE_BIAS = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "SmolLM3ForCausalLM")


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Feed-forwards of a mixture of experts."""

    count: int
    active: int  # experts of a token
    intermediate_size: int
    renormalises: bool  # the weights of the active experts are divided by their sum
    layers: frozenset[int]  # layers with experts; others have one feed-forward


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    attention: tuple[AttentionKind, ...]  # of each layer
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
    max_positions: int
    eos: frozenset[int]  # tokens that end a generation, from config.json and generation_config.json together

    def expert_count(self, layer: int) -> int:
        """Return the number of experts of a layer; 0 if it has one feed-forward."""
        return self.experts.count if self.experts and layer in self.experts.layers else 0


def read_config(directory: Path) -> ModelConfig:
    """Read the configuration in `directory`; raise `UsageError` for a model that the engine cannot compute."""
    path = directory / "config.json"
    raw = Fields(path, _read_json(path))
    architecture = next((str(name) for name in _as_list(raw.raw.get("architectures"))), "none")
    family = _FAMILIES.get(architecture)
    if family is None:
        raise UsageError(
            f"{path}: the embedded engine cannot run the architecture {architecture!r}; it supports "
            f"{', '.join(ARCHITECTURES)}.{did_you_mean(architecture, ARCHITECTURES)} "
            "Use a Tinker service (set TINKER_BASE_URL) for other models."
        )
    _check_variants(raw, family)
    heads, hidden = raw.read("num_attention_heads", _SIZE), raw.read("hidden_size", _SIZE)
    kv_heads = raw.read("num_key_value_heads", _SIZE, None if family.grouped else heads)
    head_dim = raw.read("head_dim", _SIZE, family.head_dim or hidden // heads)
    if heads % kv_heads:
        raise UsageError(f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise UsageError(f"{path}: head_dim {head_dim} is odd, so its dimensions cannot be rotated in pairs")
    biased = bool(raw.raw.get("attention_bias", False)) and architecture in _MAY_HAVE_BIAS
    scalar = raw.read("query_pre_attn_scalar", _NUMBER, 256.0) if family.is_gemma else float(head_dim)
    generation = directory / "generation_config.json"
    eos = _read_eos(raw.raw) | (_read_eos(_read_json(generation)) if generation.exists() else frozenset[int]())
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.read("vocab_size", _SIZE),
        hidden_size=hidden,
        intermediate_size=raw.read("intermediate_size", _SIZE),
        layers=raw.read("num_hidden_layers", _SIZE),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=raw.read("rms_norm_eps", _NUMBER, family.norm_eps),
        attention=_read_attention(raw, family, head_dim),
        activation=_ACTIVATIONS[_read_activation(raw, family)],
        tied=raw.read("tie_word_embeddings", FLAG, family.tied),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or biased,
        o_bias=biased,
        fused=family.fused,
        out_norms=family.is_gemma,
        norm_offset=float(family.is_gemma),
        query_factor=math.sqrt(head_dim / scalar),
        embedding_factor=math.sqrt(hidden) if family.is_gemma else 1.0,
        experts=_read_experts(raw) if family.has_experts else None,
        max_positions=raw.read("max_position_embeddings", _SIZE),
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
    weight_map = Fields(index, _read_json(index)).section("weight_map")
    names = sorted({str(name) for name in weight_map.raw.values()}) if weight_map else []
    if not names or any(Path(name).name != name for name in names):
        raise UsageError(f"{index}: weight_map must give a file of this directory for each tensor")
    for name in names:
        if not (directory / name).is_file():
            raise UsageError(f"{directory} lacks {name}, which {index.name} lists: download the model again")
    return [directory / name for name in names]


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed fields of a JSON object or of a GGUF file's metadata."""

    path: Path
    raw: Mapping[str, object]

    def read[T](self, name: str, kind: TypeAdapter[T], default: T | None = None) -> T:
        """Return a field, or `default` if it is absent or null; raise `UsageError` with its name if it is not valid."""
        value = self.raw.get(name)
        value = default if value is None else value
        try:
            return kind.validate_python(value, strict=True)
        except ValidationError as error:
            raise UsageError(f"{self.path}: {name}: {error.errors()[0]['msg']}, not {reprlib.repr(value)}") from None

    def section(self, name: str) -> Fields | None:
        """Return a field that is an object; None if it is absent or null."""
        return None if self.raw.get(name) is None else Fields(self.path, self.read(name, _OBJECT))


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
    if family.is_gemma:
        names = ("attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
        unsupported |= {name: bool(raw.get(name)) for name in names}
    for name in (name for name, is_unsupported in unsupported.items() if is_unsupported):
        raise UsageError(f"{config.path}: {name} = {raw.get(name)!r} is not supported by the embedded engine")


def _read_activation(config: Fields, family: _Family) -> str:
    return str(config.raw.get(family.activation_field) or ("gelu_pytorch_tanh" if family.is_gemma else "silu"))


def _read_attention(config: Fields, family: _Family, head_dim: int) -> tuple[AttentionKind, ...]:
    """Read the rotary embedding and the sliding window of each layer."""
    layers = config.read("num_hidden_layers", _SIZE)
    unrotated = _read_unrotated(config, layers) if family.unrotated_layers else frozenset[int]()
    parameters, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    local = None
    if parameters is not None and family.local_theta is not None:
        parameters, local = parameters.section("full_attention"), parameters.section("sliding_attention")
    if parameters and scaling and not scaling.raw.items() <= parameters.raw.items():
        raise UsageError(f"{config.path}: rope_parameters and rope_scaling contradict each other: remove one of them")
    kind = sliding_kind = _read_kind(parameters or scaling, config, "rope_theta", family.rope_theta, head_dim)
    if family.local_theta is not None:
        sliding_kind = _read_kind(local, config, "rope_local_base_freq", family.local_theta, head_dim)
    slides = _read_sliding_layers(config, family, layers, unrotated)
    window = config.read("sliding_window", _SIZE, family.sliding_window) if slides else _SIZE_MAX
    if window < config.read("max_position_embeddings", _SIZE):
        sliding_kind = replace(sliding_kind, window=window)
    kinds = [sliding_kind if index in slides else kind for index in range(layers)]
    return tuple(replace(kind, theta=None) if index in unrotated else kind for index, kind in enumerate(kinds))


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
        interval = config.read("sliding_window_pattern", _SIZE, 6)
        sliding = frozenset(range(layers)) - {*range(interval - 1, layers, interval)}
    if sliding is None and has_window:
        return unrotated if family.unrotated_layers else range(config.read("max_window_layers", _COUNT, 28), layers)
    if sliding and not has_window:
        name = "sliding_window" if is_used else "use_sliding_window"
        raise UsageError(f"{config.path}: {name} = {config.raw.get(name)!r}, but layers have a sliding window: set it")
    return sliding or range(0)


def _read_experts(config: Fields) -> ExpertConfig | None:
    layers, step = config.read("num_hidden_layers", _SIZE), config.read("decoder_sparse_step", _SIZE, 1)
    dense = config.read("mlp_only_layers", _INTEGERS, [])
    count = config.read("num_experts", _SIZE, config.read("num_local_experts", _SIZE, 128))
    active = config.read("num_experts_per_tok", _SIZE, 8)
    if active > count:
        raise UsageError(f"{config.path}: num_experts_per_tok {active} is greater than the number of experts, {count}")
    return ExpertConfig(
        count=count,
        active=active,
        intermediate_size=config.read("moe_intermediate_size", _SIZE),
        renormalises=config.read("norm_topk_prob", FLAG, default=False),
        layers=frozenset(range(step - 1, layers, step)) - {*dense},
    )


def _read_unrotated(config: Fields, layers: int) -> frozenset[int]:
    """Read the layers without rotary embedding: zeros of SmolLM3's `no_rope_layers`, by default every fourth."""
    unrotated = _read_marks(config, "no_rope_layers", (0, 1), layers)
    if unrotated is None:
        interval = config.read("no_rope_layer_interval", _SIZE, 4)
        return frozenset(range(interval - 1, layers, interval))
    return unrotated


def _read_marks(config: Fields, name: str, marks: tuple[object, object], layers: int) -> frozenset[int] | None:
    """Read the layers with the first of two marks in a list of marks; None if the field is absent or null."""
    if config.raw.get(name) is None:
        return None
    values = _as_list(config.raw[name])
    if len(values) != layers or any(value not in marks for value in values):
        raise UsageError(f"{config.path}: {name} must have {marks[0]!r} or {marks[1]!r} for each of {layers} layers")
    return frozenset(index for index, value in enumerate(values) if value == marks[0])


def _read_kind(rope: Fields | None, config: Fields, base: str, default_base: float, head_dim: int) -> AttentionKind:
    """Read a rotary embedding, with its scaling, if any; its base may be in the field `base` of config.json."""
    rope = rope or Fields(config.path, {})
    theta = rope.read("rope_theta", _NUMBER, config.read(base, _NUMBER, default_base))
    if theta <= 1:
        raise UsageError(f"{config.path}: {base} must be greater than 1, not {theta}")
    for factor in (fields.raw.get("partial_rotary_factor") for fields in (config, rope)):
        if factor not in (None, 1):
            raise UsageError(f"{config.path}: partial_rotary_factor = {factor!r} is not supported by the engine")
    return AttentionKind(theta, _read_scaling(rope, config, theta, head_dim))


def _read_scaling(
    rope: Fields, config: Fields, theta: float, head_dim: int
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    kind = str(rope.raw.get("rope_type", rope.raw.get("type", "default")))
    if any(isinstance(value, dict) for value in rope.raw.values()):
        raise UsageError(f"{rope.path}: rotary embeddings that differ by layer type are not supported")
    if kind == "linear":
        return LinearScaling(rope.read("factor", _NUMBER))
    if kind == "llama3":
        low, high = rope.read("low_freq_factor", _NUMBER), rope.read("high_freq_factor", _NUMBER)
        if low >= high:
            raise UsageError(f"{rope.path}: low_freq_factor {low} must be less than high_freq_factor {high}")
        return Llama3Scaling(
            rope.read("factor", _NUMBER), low, high, rope.read("original_max_position_embeddings", _SIZE)
        )
    if kind == "yarn":
        return _read_yarn(rope, config, theta, head_dim)
    if kind != "default":
        raise UsageError(f"{rope.path}: rotary scaling {kind!r} is not supported; supported: {', '.join(_SCALINGS)}")
    return None


def _read_yarn(rope: Fields, config: Fields, theta: float, head_dim: int) -> YarnScaling:
    longest = config.read("max_position_embeddings", _SIZE)
    original = rope.read("original_max_position_embeddings", _SIZE, longest)
    factor = rope.read("factor", _NUMBER, longest / original)

    def amplitude(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    def index_of(rotations: float) -> float:
        """Return the index of the frequency with this number of rotations within the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(rope.read("beta_fast", _NUMBER, 32.0)), index_of(rope.read("beta_slow", _NUMBER, 1.0))
    if rope.read("truncate", FLAG, default=True):
        low, high = math.floor(low), math.ceil(high)
    if rope.raw.get("mscale") and rope.raw.get("mscale_all_dim"):
        default_amplitude = amplitude(rope.read("mscale", _NUMBER)) / amplitude(rope.read("mscale_all_dim", _NUMBER))
    else:
        default_amplitude = amplitude()
    low, high = max(low, 0), min(high, head_dim - 1)
    return YarnScaling(factor, low, high, rope.read("attention_factor", _NUMBER, default_amplitude))


def _read_eos(raw: Mapping[str, object]) -> frozenset[int]:
    return frozenset[int](token for token in _as_list(raw.get("eos_token_id")) if isinstance(token, int))


def _as_list(value: object) -> list[object]:
    """Return a JSON list, or a list of the value."""
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _read_json(path: Path) -> dict[str, object]:
    try:
        raw: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: a model directory must have this file") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{path} must be a JSON object")
    return cast("dict[str, object]", raw)
