"""From the rewards of a group to the advantages of its episodes.

Invariants of every estimator here: a failed episode gets 0 and moves no one else's advantage; equal rewards give
exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from rlkit.errors import ConfigError, EnvironmentFault, did_you_mean
from rlkit.types import Group

type Advantages = NDArray[np.float64] | Sequence[NDArray[np.float64]]
"""[G] float64, one for each episode; or G arrays, one advantage for each turn of the episode."""


class AdvantageEstimator(Protocol):
    """A function of a group; any callable of this shape will do, by name or by import path.

    ::

        def best_of(group: rlkit.Group) -> np.ndarray:
            return np.where(group.rewards == np.nanmax(group.rewards), 1.0, 0.0)
    """

    def __call__(self, group: Group) -> Advantages:
        """One advantage for each episode ([G] float64), or for each turn of each episode."""
        ...


def group_mean(group: Group) -> NDArray[np.float64]:
    """Reward minus the group's mean, A_i = r_i − mean(r), the plain REINFORCE baseline."""
    return _centred(group)


def grpo(group: Group) -> NDArray[np.float64]:
    """Reward standardised in its group, A_i = (r_i − mean(r)) / std(r), the population's deviation.

    Source: Shao et al. 2024, DeepSeekMath, §4.1.2 (arXiv:2402.03300).
    """
    centred = _centred(group)
    scale = float(np.abs(centred).max(initial=0.0))
    if scale == 0:
        return centred
    unit = centred / scale  # rewards near the ends of the float range would overflow when squared
    deviation = float(np.sqrt(np.mean(np.square(unit[group.valid]))))
    return unit / deviation


def _centred(group: Group) -> NDArray[np.float64]:
    advantages = np.zeros(len(group.episodes))
    rewards = group.rewards[group.valid]
    if len(rewards) and rewards.min() != rewards.max():
        centre = np.mean(rewards / len(rewards)) * len(rewards)  # the plain sum could overflow
        advantages[group.valid] = rewards - centre
    return advantages


ESTIMATORS: dict[str, AdvantageEstimator] = {"group_mean": group_mean, "grpo": grpo}


def estimator(spec: str, *, base: Path | None = None) -> AdvantageEstimator:
    """The estimator of that name, or the callable at that import path.

    Raises:
        ConfigError: there is no such estimator.
    """
    if spec in ESTIMATORS:
        return ESTIMATORS[spec]
    if ":" not in spec:
        raise ConfigError(
            f"advantage: there is no estimator {spec!r}.{did_you_mean(spec, ESTIMATORS)} "
            f"Known: {', '.join(sorted(ESTIMATORS))}, or your own as package.module:name or file.py:name"
        )
    from rlkit.config.objects import load_object

    found = load_object(spec, field="advantage", base=base)
    if not callable(found):
        raise ConfigError(f"advantage: {spec} is not a function of a group")
    return cast("AdvantageEstimator", found)


def by_turn(advantages: Advantages, group: Group) -> list[NDArray[np.float64]]:
    """Advantages as one array for each episode with one value for each of its turns, checked.

    Raises:
        EnvironmentFault: their number is not that of the episodes or turns, or one is not finite.
    """
    if len(advantages) != len(group.episodes):
        raise EnvironmentFault(
            f"the estimator gave {len(advantages)} advantages for the {len(group.episodes)} episodes of a group of "
            f"{group.env}"
        )
    rows = list[NDArray[np.float64]]()
    for value, episode in zip(advantages, group.episodes, strict=True):
        row: NDArray[np.float64] = np.asarray(value, dtype=np.float64)
        row = np.full(len(episode.turns), float(row)) if row.ndim == 0 else row
        if row.shape != (len(episode.turns),):
            raise EnvironmentFault(f"the estimator gave {row.shape} advantages for {len(episode.turns)} turns")
        if not np.isfinite(row).all():
            raise EnvironmentFault(f"the estimator gave an advantage that is not finite for a group of {group.env}")
        rows.append(row if episode.reward is not None else np.zeros(len(episode.turns)))
    return rows
