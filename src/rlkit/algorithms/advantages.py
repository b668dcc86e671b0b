"""From a configuration to an advantage estimator, and from what an estimator gives to one advantage for each turn.

Invariants: what is trained on is finite, and of the number of the turns; an episode that failed or is masked gets 0
whatever an estimator says. The formulas are in `rlkit.algorithms.estimators`.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from rlkit._util.json_values import text_of
from rlkit.algorithms import estimators as formulas
from rlkit.algorithms.entropic_temperature import LN2, saturated
from rlkit.algorithms.estimators import group_mean, grpo
from rlkit.config.schema.advantage import (
    AdvantageConfig,
    CustomAdvantage,
    EntropicAdaptiveAdvantage,
    EntropicAdvantage,
    EntropicValidAwareAdvantage,
    PkpoAdvantage,
    PlainAdvantage,
    QuantileAdvantage,
    TurnReturnsAdvantage,
    needs_whole_steps,
)
from rlkit.errors import ConfigError, EnvironmentFault, did_you_mean
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
            raise ConfigError(f"envs.{name}: {needs_whole_steps(title(one))}")
    return chosen


def estimated(one: Estimator, groups: Sequence[Group]) -> list[list[NDArray[np.float64]]]:
    """The advantages of each group, one for each turn of each episode, checked.

    Args:
        one: the estimator; only a `BatchEstimator` sees more than one group.
        groups: of one environment.

    Returns:
        for each group and each of its episodes, [turns] float64.

    Raises:
        EnvironmentFault: it raised, or gave something else than it must; the message names it.
    """
    env, name = groups[0].env, title(one)
    try:
        found = _of_step(one, groups) if isinstance(one, BatchEstimator) else [one(group) for group in groups]
        return [by_turn(advantages, group, of=name) for advantages, group in zip(found, groups, strict=True)]
    except EnvironmentFault:
        raise
    except (Exception, SystemExit) as error:  # the user's own code
        told = f"{type(error).__name__}: {text_of(error)}{_place(error)}"
        raise EnvironmentFault(f"the advantage estimator {name} failed on a group of {env}: {told}") from error


def by_turn(advantages: object, group: Group, *, of: str = "") -> list[NDArray[np.float64]]:
    """Advantages as one array for each episode with one value for each of its turns, checked.

    Args:
        advantages: what the estimator gave.
        group: for this.
        of: the estimator, in messages.

    Raises:
        EnvironmentFault: they are none, their number is not that of the episodes or turns, or one is no number of 32
            bits.
    """
    count = len(group.episodes)
    who = f"the advantage estimator {of}".rstrip()
    wanted = (
        f"it must return {count} number{'s' * (count != 1)} for the {count} episode{'s' * (count != 1)} of a group of "
        f"{group.env}, or as many arrays with a number for each turn"
    )
    values = _listed(advantages)
    if values is None:
        raise EnvironmentFault(f"{who} returned {_shown(advantages)}: {wanted}")
    if len(values) != count:
        raise EnvironmentFault(f"{who} returned {len(values)} advantage{'s' * (len(values) != 1)}: {wanted}")
    rows = list[NDArray[np.float64]]()
    for place, (value, episode) in enumerate(zip(values, group.episodes, strict=True)):
        row = _numbers(value)
        if row is None:
            raise EnvironmentFault(f"{who} returned {_shown(value)} for episode {place}: {wanted}")
        turns = len(episode.turns)
        row = np.full(turns, float(row)) if row.ndim == 0 else row
        if row.shape != (turns,):
            given = " × ".join(map(str, row.shape))
            raise EnvironmentFault(
                f"{who} returned {given} advantages for the {turns} turn{'s' * (turns != 1)} of episode {place}: "
                f"{wanted}"
            )
        if not np.isfinite(row).all():
            raise EnvironmentFault(
                f"{who} returned {row[~np.isfinite(row)][0]:g} for episode {place}: {wanted}, all of them finite"
            )
        if np.abs(row).max(initial=0.0) > _LARGEST:
            raise EnvironmentFault(
                f"{who} returned an advantage of {row[np.abs(row).argmax()]:g} for a group of {group.env}, too large "
                "for the 32 bits that it is trained with: scale the rewards down, or take an advantage that does"
            )
        taught = episode.reward is not None and not episode.masked
        rows.append(row if taught else np.zeros(turns))
    return rows


def title(one: Estimator) -> str:
    """What people know an estimator by: its function, and the file of one that is the user's own."""
    function, _ = _function(one)
    name = getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]
    if getattr(function, "__module__", None) == formulas.__name__:
        return name
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def report(one: Estimator, group: Group) -> Mapping[str, float]:
    """What there is to say of how a group was estimated, by name.

    Of the estimators that search for a temperature it is `saturated`: 1 where none gives the divergence that was asked
    for, and 0 where one does. Of a group that needs no search, and of other estimators, it is nothing.
    """
    function, settings = _function(one)
    if function is formulas.entropic_adaptive:
        compared = np.isfinite(group.rewards)
    elif function is formulas.entropic_valid_aware:
        compared = formulas.valid_episodes(group)
    else:
        return {}
    kl = cast("float", settings.get("kl", LN2))
    found = saturated(group.rewards[compared], kl=kl)
    return {} if found is None else {"saturated": float(found)}


def _of_step(one: BatchEstimator, groups: Sequence[Group]) -> Sequence[object]:
    found: object = one(groups)
    values = _listed(found)
    if values is not None and len(values) == len(groups):
        return values
    given = f"{_shown(found)} for the" if values is None else f"advantages for {len(values)} of {len(groups)}"
    raise EnvironmentFault(
        f"the advantage estimator {title(one)} returned {given} groups of {groups[0].env}: it must return those of "
        f"each group of the step, {len(groups)} here, in their order"
    )


def _listed(found: object) -> Sequence[object] | None:
    """The items of an array or a sequence; None for anything else, such as a mapping, which would give its keys."""
    if isinstance(found, str | bytes | Mapping) or not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        return None
    try:
        return list(cast("Sequence[object]", found))
    except TypeError:  # an array of no dimensions has no items
        return None


def _numbers(value: object) -> NDArray[np.float64] | None:
    """A number or numbers as an array; None where they are none."""
    if isinstance(value, str | bytes | Mapping):
        return None
    try:
        made: NDArray[np.generic] = np.asarray(value)
        return None if made.dtype.kind not in "biuf" else made.astype(np.float64)
    except (TypeError, ValueError, RuntimeError):  # the last is a tensor's that wants a gradient
        return None


def _shown(value: object) -> str:
    if inspect.iscoroutine(value):
        value.close()
        return "a coroutine, as it is an async function"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _place(error: BaseException) -> str:
    """` at file:line`, where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _function(one: Estimator) -> tuple[Callable[..., object], Mapping[str, object]]:
    """What an estimator calls in the end, and the settings that this is given."""
    inner: object = one
    settings: Mapping[str, object] = {}
    while True:
        if isinstance(inner, BatchEstimator):
            inner = inner.function
        elif isinstance(inner, partial):
            bound = cast("partial[object]", inner)
            inner, settings = bound.func, {**bound.keywords, **settings}
        elif hasattr(inner, "__wrapped__"):
            inner = cast("object", inner.__wrapped__)
        else:
            return cast("Callable[..., object]", inner), settings


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
    from rlkit.config.loading.objects import load_object

    found = load_object(path, field="advantage", base=base)
    if not callable(found):
        raise ConfigError(f"advantage: {path} is not a function of a group")
    return cast("Estimator", found)
