"""What a model directory says about its architecture.

Invariant: a `ModelConfig` describes a model that `rlkit.engine.model` computes exactly; anything else is refused by
name before a weight is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rlkit.errors import UsageError, did_you_mean

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's stretching of the rotary wavelengths (Meta, Llama 3.1 model card and reference code)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a dense decoder.

    Args:
        eos: tokens that end a generation, from config.json and generation_config.json together.
        linear_scaling: divides rotary positions; 1 when unscaled.
    """

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
    linear_scaling: float
    llama3_scaling: Llama3Scaling | None
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    max_positions: int
    eos: frozenset[int]

    def inverse_frequencies(self) -> list[float]:
        """Rotary angle per position, [head_dim / 2], in radians."""
        base = [self.rope_theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2)]
        if self.llama3_scaling is None:
            return [f / self.linear_scaling for f in base]
        return [_llama3(frequency, self.llama3_scaling) for frequency in base]


def read_config(directory: Path) -> ModelConfig:
    """The configuration in `directory`.

    Raises:
        UsageError: config.json is missing or broken, or describes a model that the engine does not compute.
    """
    path = directory / "config.json"
    raw = _Fields(path, _read_json(path))
    architecture = next((str(name) for name in _list(raw.raw.get("architectures"))), "none")
    if architecture not in ARCHITECTURES:
        raise UsageError(
            f"{path}: the embedded engine cannot run the architecture {architecture!r}; it runs "
            f"{', '.join(ARCHITECTURES)}.{did_you_mean(architecture, ARCHITECTURES)} "
            "Use a Tinker service (set TINKER_BASE_URL) for other models."
        )
    _refuse_variants(raw)
    rope = raw.section("rope_parameters") or raw.section("rope_scaling") or _Fields(path, {})
    kind = str(rope.raw.get("rope_type", rope.raw.get("type", "default")))
    if kind not in ("default", "linear", "llama3"):
        raise UsageError(f"{path}: rotary scaling {kind!r} is not supported; known are default, linear, llama3")
    heads, hidden = raw.integer("num_attention_heads"), raw.integer("hidden_size")
    generation = directory / "generation_config.json"
    eos = _tokens(raw.raw) | (_tokens(_read_json(generation)) if generation.exists() else frozenset[int]())
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=raw.integer("intermediate_size"),
        layers=raw.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=raw.integer("num_key_value_heads", heads),
        head_dim=raw.integer("head_dim", hidden // heads),
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", raw.number("rope_theta", 10_000.0)),
        linear_scaling=rope.number("factor") if kind == "linear" else 1.0,
        llama3_scaling=Llama3Scaling(
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.integer("original_max_position_embeddings"),
        )
        if kind == "llama3"
        else None,
        tied=bool(raw.raw.get("tie_word_embeddings", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        qkv_bias=architecture == "Qwen2ForCausalLM",
        max_positions=raw.integer("max_position_embeddings"),
        eos=eos,
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """A JSON object whose missing or ill-typed fields are errors that name the file."""

    path: Path
    raw: Mapping[str, object]

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{self.path}: {name} must be a positive integer, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UsageError(f"{self.path}: {name} must be a number, not {value!r}")
        return float(value)

    def section(self, name: str) -> _Fields | None:
        value = self.raw.get(name)
        return _Fields(self.path, cast("dict[str, object]", value)) if isinstance(value, dict) else None


def _refuse_variants(config: _Fields) -> None:
    """Options of the known architectures that would change the numbers."""
    raw = config.raw
    wrong = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(raw.get("attention_bias", False)),
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "use_sliding_window": bool(raw.get("use_sliding_window", False)),
        "quantization_config": raw.get("quantization_config") is not None,
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise UsageError(f"{config.path}: {name} = {raw.get(name)!r} is not supported by the embedded engine")


def _llama3(frequency: float, scaling: Llama3Scaling) -> float:
    wavelength = 2 * math.pi / frequency
    ratio = scaling.original_positions / wavelength
    if ratio < scaling.low_frequency_factor:
        return frequency / scaling.factor
    if ratio > scaling.high_frequency_factor:
        return frequency
    spread = scaling.high_frequency_factor - scaling.low_frequency_factor
    smooth = (ratio - scaling.low_frequency_factor) / spread
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _tokens(raw: Mapping[str, object]) -> frozenset[int]:
    return frozenset[int](token for token in _list(raw.get("eos_token_id")) if isinstance(token, int))


def _list(value: object) -> list[object]:
    """A JSON list, or the value as the only element of one."""
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _read_json(path: Path) -> dict[str, object]:
    try:
        raw: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: a model directory needs one") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{path} must hold a JSON object")
    return cast("dict[str, object]", raw)
