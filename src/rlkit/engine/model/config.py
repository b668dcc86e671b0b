"""Architecture of a model, read from its directory.

Invariant: a `ModelConfig` describes a model that `rlkit.engine.model.transformer` computes exactly. Other models raise
an error that names the unsupported option, before any weight is read.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

from pydantic import Field, TypeAdapter, ValidationError

from rlkit.errors import UsageError, did_you_mean

_SIZE_MAX = 2**24  # far above every size of a dense model
_SIZE = TypeAdapter[int](Annotated[int, Field(ge=1, le=_SIZE_MAX)])
_NUMBER = TypeAdapter[float](Annotated[float, Field(gt=0, allow_inf_nan=False)])
FLAG = TypeAdapter(bool)
_SLIDING = "sliding_attention"
_SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class _Family:
    """Differences of an architecture from Llama, and defaults of its config.json."""

    qk_norm: bool = False
    qkv_bias: bool = False
    fused: bool = False
    unrotated_layers: bool = False
    always_slides: bool = False
    """`sliding_window` applies even without `use_sliding_window`."""
    head_dim: int | None = None
    grouped: bool = True
    """config.json must have `num_key_value_heads`, which otherwise defaults to the number of query heads."""
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tied: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family(grouped=False),
    "MistralForCausalLM": _Family(always_slides=True),
    "Phi3ForCausalLM": _Family(fused=True, always_slides=True, grouped=False, norm_eps=1e-5),
    "Qwen2ForCausalLM": _Family(qkv_bias=True),
    "Qwen3ForCausalLM": _Family(qk_norm=True, head_dim=128),
    "SmolLM3ForCausalLM": _Family(unrotated_layers=True, rope_theta=2_000_000.0, tied=True),
}
ARCHITECTURES = tuple(_FAMILIES)
_MAY_HAVE_BIAS = ("LlamaForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM")  # by `attention_bias`


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Rotary positions divided by `factor` (Chen et al. 2023)."""

    factor: float

    def apply(self, frequencies: list[float]) -> list[float]:
        """Scale frequencies, in radians per position."""
        return [frequency / self.factor for frequency in frequencies]


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's scaling of the rotary wavelengths (Meta, Llama 3.1 model card and reference code)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int

    def apply(self, frequencies: list[float]) -> list[float]:
        """Scale frequencies: divide low ones by `factor`, keep high ones, and blend in between."""
        spread = self.high_frequency_factor - self.low_frequency_factor
        turns = [self.original_positions * frequency / (2 * math.pi) for frequency in frequencies]
        blends = [min(max((turn - self.low_frequency_factor) / spread, 0.0), 1.0) for turn in turns]
        return [f * blend + f / self.factor * (1 - blend) for f, blend in zip(frequencies, blends, strict=True)]


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, section 3): low frequencies divided by `factor`, high ones kept, a ramp in between."""

    factor: float
    low: float  # index of the first frequency on the ramp; may be fractional
    high: float  # index of the last frequency on the ramp
    amplitude: float  # factor of the cosines and sines

    def apply(self, frequencies: list[float]) -> list[float]:
        """Scale frequencies, in radians per position."""
        width = max(self.high - self.low, 1e-3)
        ramp = [min(max((index - self.low) / width, 0.0), 1.0) for index in range(len(frequencies))]
        return [f * (1 - weight) + f / self.factor * weight for f, weight in zip(frequencies, ramp, strict=True)]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a dense decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: LinearScaling | Llama3Scaling | YarnScaling | None
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool  # the output projection of the attention has a bias
    fused: bool  # the files store query, key and value as one matrix, and gate and up as one matrix
    unrotated: frozenset[int]  # layers without rotary embedding
    max_positions: int
    eos: frozenset[int]  # tokens that end a generation, from config.json and generation_config.json together

    def inverse_frequencies(self) -> list[float]:
        """Return the rotary angle per position, [head_dim / 2], in radians."""
        base = [self.rope_theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2)]
        return self.rope_scaling.apply(base) if self.rope_scaling else base

    @property
    def rope_amplitude(self) -> float:
        """Factor of the cosines and sines of the rotary embedding."""
        return self.rope_scaling.amplitude if isinstance(self.rope_scaling, YarnScaling) else 1.0


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
    _check_variants(raw)
    layers, max_positions = raw.read("num_hidden_layers", _SIZE), raw.read("max_position_embeddings", _SIZE)
    _check_sliding_window(raw, family, max_positions)
    heads, hidden = raw.read("num_attention_heads", _SIZE), raw.read("hidden_size", _SIZE)
    kv_heads = raw.read("num_key_value_heads", _SIZE, None if family.grouped else heads)
    head_dim = raw.read("head_dim", _SIZE, family.head_dim or hidden // heads)
    if heads % kv_heads:
        raise UsageError(f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise UsageError(f"{path}: head_dim {head_dim} is odd, so its dimensions cannot be rotated in pairs")
    rope = raw.section("rope_parameters") or raw.section("rope_scaling") or Fields(path, {})
    theta = rope.read("rope_theta", _NUMBER, raw.read("rope_theta", _NUMBER, family.rope_theta))
    if theta <= 1:
        raise UsageError(f"{path}: rope_theta must be greater than 1, not {theta}")
    biased = bool(raw.raw.get("attention_bias", False)) and architecture in _MAY_HAVE_BIAS
    generation = directory / "generation_config.json"
    eos = _read_eos(raw.raw) | (_read_eos(_read_json(generation)) if generation.exists() else frozenset[int]())
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.read("vocab_size", _SIZE),
        hidden_size=hidden,
        intermediate_size=raw.read("intermediate_size", _SIZE),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=raw.read("rms_norm_eps", _NUMBER, family.norm_eps),
        rope_theta=theta,
        rope_scaling=_read_scaling(rope, raw, theta, head_dim),
        tied=raw.read("tie_word_embeddings", FLAG, family.tied),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or biased,
        o_bias=biased,
        fused=family.fused,
        unrotated=_read_unrotated(raw, layers) if family.unrotated_layers else frozenset(),
        max_positions=max_positions,
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
        """Return a field that is an object; None if it is not."""
        value = self.raw.get(name)
        return Fields(self.path, cast("dict[str, object]", value)) if isinstance(value, dict) else None


def _check_variants(config: Fields) -> None:
    """Raise `UsageError` for options that the engine does not support."""
    raw = config.raw
    quantisation = config.section("quantization_config")
    if quantisation is not None:
        method = quantisation.raw.get("quant_method", "an unnamed method")
        raise UsageError(
            f"{config.path}: weights quantised with {method} (quantization_config) are not supported by the embedded "
            "engine; use the unquantised model or a GGUF file"
        )
    rotary_factor = (config.section("rope_parameters") or config).raw.get("partial_rotary_factor", 1.0)
    unsupported = {
        "hidden_act": raw.get("hidden_act", "silu") not in ("silu", "swish"),
        "mlp_bias": config.read("mlp_bias", FLAG, default=False),
        "partial_rotary_factor": (raw.get("partial_rotary_factor") or 1.0) != 1.0 or (rotary_factor or 1.0) != 1.0,
    }
    for name in (name for name, is_unsupported in unsupported.items() if is_unsupported):
        value = raw.get(name, rotary_factor)
        raise UsageError(f"{config.path}: {name} = {value!r} is not supported by the embedded engine")


def _check_sliding_window(config: Fields, family: _Family, max_positions: int) -> None:
    """Raise `UsageError` for a sliding window that some layer uses and that is shorter than the context."""
    slides = family.always_slides or (
        config.read("use_sliding_window", FLAG, default=False)
        and _SLIDING in _as_list(config.raw.get("layer_types") or _SLIDING)
    )
    if not slides or config.raw.get("sliding_window") is None:
        return
    window = config.read("sliding_window", _SIZE)
    if window < max_positions:
        raise UsageError(
            f"{config.path}: sliding_window = {window} is shorter than max_position_embeddings = {max_positions}; "
            "the embedded engine computes full attention only"
        )


def _read_unrotated(config: Fields, layers: int) -> frozenset[int]:
    """Read the layers without rotary embedding: zeros of SmolLM3's `no_rope_layers`, by default every fourth."""
    marks_value = config.raw.get("no_rope_layers")
    if marks_value is None:
        interval = config.read("no_rope_layer_interval", _SIZE, 4)
        return frozenset(range(interval - 1, layers, interval))
    marks = _as_list(marks_value)
    if len(marks) < layers or any(mark not in (0, 1) for mark in marks):
        raise UsageError(f"{config.path}: no_rope_layers must have a 0 or a 1 for each of the {layers} layers")
    return frozenset(index for index in range(layers) if marks[index] == 0)


def _read_scaling(
    rope: Fields, config: Fields, theta: float, head_dim: int
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    """Read the scaling of the rotary embedding, if any."""
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
