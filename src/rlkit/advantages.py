"""From a configuration to an advantage estimator, and from what an estimator gives to one advantage for each turn.

Invariants: what is trained on is finite, and of the number of the turns; an episode that failed or is masked gets 0
whatever an estimator says. The formulas are in `rlkit.estimators`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from rlkit import estimators as formulas
from rlkit.config.advantage import (
    AdvantageConfig,
    CustomAdvantage,
    EntropicAdaptiveAdvantage,
    EntropicAdvantage,
    EntropicValidAwareAdvantage,
    PkpoAdvantage,
    PlainAdvantage,
    QuantileAdvantage,
    TurnReturnsAdvantage,
)
from rlkit.errors import ConfigError, EnvironmentFault, did_you_mean
from rlkit.estimators import group_mean, grpo
from rlkit.types import Group

if TYPE_CHECKING:
    from rlkit.config.schema import Config

type Advantages = NDArray[np.float64] | Sequence[NDArray[np.float64]]
"""[G] float64, one for each episode; or G arrays, one advantage for each turn of the episode."""

_LARGEST = float(np.finfo(np.float32).max)


class AdvantageEstimator(Protocol):
    """A function of a group; any callable of this shape will do, by name or by import path.

    ::

        def best_of(group: rlkit.Group) -> np.ndarray:
            return np.where(group.rewards == np.nanmax(group.rewards), 1.0, 0.0)
    """

    def __call__(self, group: Group) -> Advantages:
        """One advantage for each episode ([G] float64), or for each turn of each episode."""
        ...


@dataclass(frozen=True, slots=True)
class BatchEstimator:
    """An estimator that sees all groups of a step that are of its environment; put it over a function of them.

    ::

        @rlkit.BatchEstimator
        def against_all(groups: Sequence[rlkit.Group]) -> list[np.ndarray]:
            mean = np.nanmean(np.concatenate([group.rewards for group in groups]))
            return [np.nan_to_num(group.rewards - mean) for group in groups]

    A group is played anew, where `batch.replace_uninformative` says so, if it gets nothing but 0 as the only one of its
    step. The schedule `stream` computes gradients before a step is complete, so it has no use for such an estimator.

    Args:
        function: from the groups to the advantages of each, in their order.
    """

    function: Callable[[Sequence[Group]], Sequence[Advantages]]

    def __call__(self, groups: Sequence[Group]) -> Sequence[Advantages]:
        """The advantages of each group, in their order."""
        return self.function(groups)


type Estimator = AdvantageEstimator | BatchEstimator

ESTIMATORS: dict[str, Estimator] = {
    "group_mean": group_mean,
    "grpo": grpo,
    "rloo": formulas.rloo,
    "batch_std": BatchEstimator(formulas.batch_std),
    "reinforce_pp_baseline": BatchEstimator(formulas.reinforce_pp_baseline),
    "opo": formulas.opo,
    "maxrl": formulas.maxrl,
    "pkpo": formulas.pkpo,
    "best_vs_second": formulas.best_vs_second,
    "entropic": formulas.entropic,
    "entropic_adaptive": formulas.entropic_adaptive,
    "entropic_valid_aware": formulas.entropic_valid_aware,
    "quantile": formulas.quantile,
    "median_mad": formulas.median_mad,
    "rank": formulas.rank,
    "turn_returns": formulas.turn_returns,
}
"""Each with the defaults of its settings."""


def estimator(spec: str | AdvantageConfig, *, base: Path | None = None) -> Estimator:
    """The estimator of that name or section, or the callable at that import path.

    Args:
        spec: a section of the configuration, or a name or import path, which is short for one.
        base: the folder that a relative file starts from; the working directory by default.

    Raises:
        ConfigError: there is no such estimator.
    """
    if not isinstance(spec, str):
        return _configured(spec, base=base)
    if ":" in spec:
        return _loaded(spec, base=base)
    if spec not in ESTIMATORS:
        raise ConfigError(
            f"advantage: there is no estimator {spec!r}.{did_you_mean(spec, ESTIMATORS)} "
            f"Known: {', '.join(sorted(ESTIMATORS))}, or your own as package.module:name or file.py:name"
        )
    return ESTIMATORS[spec]


def choose_estimators(config: Config, given: Mapping[str, Estimator]) -> dict[str, Estimator]:
    """The estimator of each environment: the one given for it, or its own, or the run's.

    Raises:
        ConfigError: there is no such estimator, or the schedule has no use for it.
    """
    chosen = {
        name: given[name] if name in given else estimator(env.advantage or config.advantage)
        for name, env in config.envs.items()
    }
    for name, one in chosen.items():
        if isinstance(one, BatchEstimator) and config.schedule.mode == "stream":
            raise ConfigError(
                f"envs.{name}: its advantage estimator needs all groups of a step at once, and with the schedule "
                "`stream` gradients are computed before they are there: set schedule.mode to sync or async, or choose "
                "another advantage"
            )
    return chosen


def by_turn(advantages: Advantages, group: Group) -> list[NDArray[np.float64]]:
    """Advantages as one array for each episode with one value for each of its turns, checked.

    Raises:
        EnvironmentFault: their number is not that of the episodes or turns, or one is no number of 32 bits.
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
        if np.abs(row).max(initial=0.0) > _LARGEST:
            raise EnvironmentFault(
                f"the estimator gave an advantage of {row[np.abs(row).argmax()]:g} for a group of {group.env}, too "
                "large for the 32 bits that it is trained with: scale the rewards down, or take an advantage that does"
            )
        taught = episode.reward is not None and not episode.masked
        rows.append(row if taught else np.zeros(len(episode.turns)))
    return rows


def _configured(section: AdvantageConfig, *, base: Path | None) -> Estimator:
    found: Estimator
    match section:
        case PlainAdvantage():
            found = ESTIMATORS[section.name]
        case PkpoAdvantage():
            found = partial(formulas.pkpo, k=section.k)
        case EntropicAdvantage():
            found = partial(formulas.entropic, beta=section.beta, clip=section.clip)
        case EntropicAdaptiveAdvantage():
            found = partial(formulas.entropic_adaptive, kl=section.kl, clip=section.clip)
        case EntropicValidAwareAdvantage():
            found = partial(formulas.entropic_valid_aware, kl=section.kl, penalty=section.penalty, clip=section.clip)
        case QuantileAdvantage():
            found = partial(formulas.quantile, quantile=section.quantile)
        case TurnReturnsAdvantage():
            found = partial(formulas.turn_returns, discount=section.discount)
        case CustomAdvantage():
            found = _loaded(section.function, base=base)
    return found


def _loaded(path: str, *, base: Path | None) -> Estimator:
    from rlkit.config.objects import load_object

    found = load_object(path, field="advantage", base=base)
    if not callable(found):
        raise ConfigError(f"advantage: {path} is not a function of a group")
    return cast("Estimator", found)
