"""The losses of the Tinker service, by name, with their settings.

All are sums over tokens; scaling is in the advantages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from rlkit.config.schema import ImportanceSamplingLoss, LossConfig, PPOLoss


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as the service takes it: its name and the numbers that set it."""

    name: str = "importance_sampling"
    settings: Mapping[str, float] = field(default_factory=dict[str, float])


def loss(config: LossConfig) -> Loss:
    """The loss that a configuration asks for."""
    match config:
        case ImportanceSamplingLoss():
            return Loss("importance_sampling")
        case PPOLoss():
            return Loss("ppo", {"clip_low_threshold": config.clip_low, "clip_high_threshold": config.clip_high})
        case _:
            assert_never(config)
