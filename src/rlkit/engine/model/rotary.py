"""Rotary embedding and sliding window of a layer's attention.

Invariant: layers with equal `AttentionKind` compute attention in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Return the rotary angle per position, [head_dim / 2], in radians."""
        if self.theta is None:
            return [0.0] * (head_dim // 2)
        base = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        return self.scaling.apply(base) if self.scaling else base

    @property
    def amplitude(self) -> float:
        """Factor of the cosines and sines of the rotary embedding."""
        return self.scaling.amplitude if isinstance(self.scaling, YarnScaling) else 1.0
