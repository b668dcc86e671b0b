"""Fields of `Config` as keyword arguments, for `rlkit.train`.

Invariant: every field of `Config` is a keyword, except those that `rlkit.train` takes as arguments of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

type SectionLike = Mapping[str, object]
"""A section of the configuration, such as `{"group_size": 4}`."""


class Settings(TypedDict, total=False):
    """Fields of `Config` as keywords."""

    model: str
    name: str | None
    seed: int
    epochs: int | None
    steps: int | None
    load_checkpoint: str | None
    budget_usd: float | None
    budget_tokens: int | None
    max_hours: float | None
    sampling: SectionLike
    source: SectionLike
    warm_start: SectionLike
    batch: SectionLike
    rollouts: SectionLike
    schedule: SectionLike
    reward: Literal["train", "none"]
    teacher: SectionLike
    teachers: Mapping[str, SectionLike]
    kl_penalty: SectionLike
    length_penalty: SectionLike
    lora: SectionLike
    optimizer: SectionLike
    checkpoint: SectionLike
    best: SectionLike
    eval: SectionLike
    prices: SectionLike
    service: SectionLike
    chat: SectionLike
    track: SectionLike
