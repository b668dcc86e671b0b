"""Rotary embedding and sliding window of a layer's attention.

Invariant: layers with equal `AttentionKind` compute attention in the same way. A rotary embedding of config.json that
is not computed exactly raises an error that names its field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlkit._util.files.model_fields import FLAG, NUMBER, SIZE, Fields
from rlkit.errors import UsageError

_SCALINGS = ("default", "linear", "llama3", "yarn")
ALL_POSITIONS = 1 << 62
"""Window that hides no position."""


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
class AttentionKind:
    """Rotary embedding and sliding window of some layers."""

    theta: float | None  # base of the rotary embedding; None: queries and keys are not rotated
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    window: int = ALL_POSITIONS  # number of last positions that a position attends to, with itself
    rotated: int | None = None  # number of a head's first dimensions that are rotated; None for all

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Return the rotary angle per position, of each pair of dimensions that are rotated, in radians."""
        head_dim = self.rotated or head_dim
        if self.theta is None:
            return [0.0] * (head_dim // 2)
        base = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        return self.scaling.apply(base) if self.scaling else base

    @property
    def amplitude(self) -> float:
        """Factor of the cosines and sines of the rotary embedding."""
        return self.scaling.amplitude if isinstance(self.scaling, YarnScaling) else 1.0


def read_rotation(
    rope: Fields | None, config: Fields, *, base: str, default_base: float, head_dim: int, is_partial: bool
) -> AttentionKind:
    """Read a rotary embedding, with its scaling, if any; its base may be in the field `base` of config.json."""
    rope = rope or Fields(config.path, {})
    theta = rope.read("rope_theta", NUMBER, config.read(base, NUMBER, default_base))
    if theta <= 1:
        raise UsageError(f"{config.path}: {base} must be greater than 1, not {theta}")
    name = "partial_rotary_factor"
    share = rope.read(name, NUMBER, config.read(name, NUMBER, 0.25 if is_partial else 1.0))
    rotated = int(head_dim * share)
    if rotated % 2 or not 0 < rotated <= head_dim or (share != 1 and not is_partial):
        raise UsageError(f"{config.path}: {name} {share} of head_dim {head_dim} is not supported by the engine")
    return AttentionKind(theta, _read_scaling(rope, config, theta, rotated), rotated=rotated if is_partial else None)


def _read_scaling(
    rope: Fields, config: Fields, theta: float, head_dim: int
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    kind = str(rope.raw.get("rope_type", rope.raw.get("type", "default")))
    if any(isinstance(value, dict) for value in rope.raw.values()):
        raise UsageError(f"{rope.path}: rotary embeddings that differ by layer type are not supported")
    if kind == "linear":
        return LinearScaling(rope.read("factor", NUMBER))
    if kind == "llama3":
        low, high = rope.read("low_freq_factor", NUMBER), rope.read("high_freq_factor", NUMBER)
        if low >= high:
            raise UsageError(f"{rope.path}: low_freq_factor {low} must be less than high_freq_factor {high}")
        return Llama3Scaling(
            rope.read("factor", NUMBER), low, high, rope.read("original_max_position_embeddings", SIZE)
        )
    if kind == "yarn":
        return _read_yarn(rope, config, theta, head_dim)
    if kind != "default":
        raise UsageError(f"{rope.path}: rotary scaling {kind!r} is not supported; supported: {', '.join(_SCALINGS)}")
    return None


def _read_yarn(rope: Fields, config: Fields, theta: float, head_dim: int) -> YarnScaling:
    longest = config.read("max_position_embeddings", SIZE)
    original = rope.read("original_max_position_embeddings", SIZE, longest)
    factor = rope.read("factor", NUMBER, longest / original)

    def amplitude(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    def index_of(rotations: float) -> float:
        """Return the index of the frequency with this number of rotations within the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(rope.read("beta_fast", NUMBER, 32.0)), index_of(rope.read("beta_slow", NUMBER, 1.0))
    if rope.read("truncate", FLAG, default=True):
        low, high = math.floor(low), math.ceil(high)
    if rope.raw.get("mscale") and rope.raw.get("mscale_all_dim"):
        default_amplitude = amplitude(rope.read("mscale", NUMBER)) / amplitude(rope.read("mscale_all_dim", NUMBER))
    else:
        default_amplitude = amplitude()
    low, high = max(low, 0), min(high, head_dim - 1)
    return YarnScaling(factor, low, high, rope.read("attention_factor", NUMBER, default_amplitude))
