"""Rotary embedding and sliding window of a layer's attention.

Invariant: layers with equal `AttentionKind` compute attention in the same way. A rotary embedding of config.json that
is not computed exactly raises an error that names its field.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlkit._util.files.model_fields import FLAG, NUMBER, SIZE, Fields
from rlkit.errors import UsageError

_SCALINGS = ("default", "linear", "llama3", "yarn")
ALL_POSITIONS = 1 << 62
"""Window that hides no position."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Rotary embedding and sliding window of some layers."""

    frequencies: tuple[float, ...]  # rotary angle per position, in radians, of each rotated pair of a head's dimensions
    window: int = ALL_POSITIONS  # number of last positions that a position attends to, with itself
    amplitude: float = 1.0  # factor of the cosines and sines


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
    frequencies = [theta ** (-2 * i / rotated) for i in range(rotated // 2)]
    kind = str(rope.raw.get("rope_type", rope.raw.get("type", "default")))
    if any(isinstance(value, dict) for value in rope.raw.values()):
        raise UsageError(f"{rope.path}: rotary embeddings that differ by layer type are not supported")
    if kind == "yarn":
        return _read_yarn(rope, config, theta, frequencies)
    if kind == "linear":
        factor = rope.read("factor", NUMBER)
        frequencies = [frequency / factor for frequency in frequencies]
    elif kind == "llama3":
        frequencies = scale_as_llama3(frequencies, rope)
    elif kind != "default":
        raise UsageError(f"{rope.path}: rotary scaling {kind!r} is not supported; supported: {', '.join(_SCALINGS)}")
    return AttentionKind(tuple(frequencies))


def scale_as_llama3(frequencies: Sequence[float], rope: Fields) -> list[float]:
    """Divide low frequencies by the field `factor`, keep high ones, and blend in between.

    (Meta, Llama 3.1 model card and reference code.)
    """
    low, high = rope.read("low_freq_factor", NUMBER), rope.read("high_freq_factor", NUMBER)
    if low >= high:
        raise UsageError(f"{rope.path}: low_freq_factor {low} must be less than high_freq_factor {high}")
    factor, original = rope.read("factor", NUMBER), rope.read("original_max_position_embeddings", SIZE)
    turns = [original * frequency / (2 * math.pi) for frequency in frequencies]
    blends = [min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns]
    return [f * blend + f / factor * (1 - blend) for f, blend in zip(frequencies, blends, strict=True)]


def _read_yarn(rope: Fields, config: Fields, theta: float, frequencies: Sequence[float]) -> AttentionKind:
    """Read YaRN (Peng et al. 2023, section 3): divide low frequencies, keep high ones, with a ramp between."""
    longest, head_dim = config.read("max_position_embeddings", SIZE), 2 * len(frequencies)
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
    width = max(high - low, 1e-3)
    ramp = [min(max((index - low) / width, 0.0), 1.0) for index in range(len(frequencies))]
    scaled = (f * (1 - weight) + f / factor * weight for f, weight in zip(frequencies, ramp, strict=True))
    return AttentionKind(tuple(scaled), amplitude=rope.read("attention_factor", NUMBER, default_amplitude))
