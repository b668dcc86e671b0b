"""Checked advantages of each turn, from a built-in estimator or the user's own.

Invariants: advantages are finite; an episode that failed or is masked gets 0, whatever the estimator returns. An
estimator sees one role at a time; the turn of an opponent gets 0.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from rlkit._util.frames import describe_error
from rlkit._util.json_values import describe_type
from rlkit.algorithms.estimator import Advantages, Estimator, StepEstimator
from rlkit.errors import EnvironmentFault
from rlkit.types import Group

_ADVANTAGE_MAX = float(np.finfo(np.float32).max)


class AdvantageEstimator(Protocol):
    """A function of a group, given by name or by import path.

    ::

        def best_of(group: rlkit.Group) -> np.ndarray:
            return np.where(group.rewards == np.nanmax(group.rewards), 1.0, 0.0)
    """

    def __call__(self, group: Group) -> Advantages:
        """Return one advantage for each episode ([G] float64), or for each turn of each episode."""
        ...


def step_estimator(function: Callable[[Sequence[Group]], Sequence[Advantages]]) -> StepFunction:
    """Mark a function as an estimator of all groups of its environment in a step.

    ::

        @rlkit.step_estimator
        def against_all(groups: Sequence[rlkit.Group]) -> list[np.ndarray]:
            mean = np.nanmean(np.concatenate([group.rewards for group in groups]))
            return [np.nan_to_num(group.rewards - mean) for group in groups]

    With `batch.replace_uninformative`, a group is replaced if all its advantages are 0 when it is the only group of the
    step. The schedule `stream` rejects the estimator, because it computes gradients before a step is complete.
    """
    return StepFunction(function=function)


class FunctionEstimator(Estimator):
    """The user's own function of a group."""

    name: ClassVar = "custom"
    function: Callable[..., object]

    @property
    def title(self) -> str:
        """The function's name, with file and line if known."""
        inner: object = self.function
        # unwrap `step_estimator`, partials and decorated functions
        while wrappers := [key for key in ("function", "func", "__wrapped__") if hasattr(inner, key)]:
            inner = cast("object", getattr(inner, wrappers[0]))
        name = getattr(inner, "__qualname__", type(inner).__name__).rpartition("<locals>.")[2]
        code = getattr(inner, "__code__", None)
        return name if code is None else f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"

    def advantages(self, group: Group) -> Advantages:  # noqa: D102  inherited
        return cast("Advantages", self.function(group))  # `estimate_advantages` checks the type


class StepFunction(StepEstimator, FunctionEstimator):
    """The user's own function of all groups of a step, from `step_estimator`."""

    def step_advantages(self, groups: Sequence[Group]) -> Sequence[Advantages]:  # noqa: D102  inherited
        return cast("Sequence[Advantages]", self.function(groups))

    def __call__(self, groups: Sequence[Group]) -> Sequence[Advantages]:
        """Return the advantages of each group, in their order."""
        return self.step_advantages(groups)


type AnyEstimator = Estimator | AdvantageEstimator


def as_estimator(estimator: AnyEstimator) -> Estimator:
    """Return an estimator itself, or wrap a user's function as an `Estimator`."""
    return estimator if isinstance(estimator, Estimator) else FunctionEstimator(function=estimator)


def estimate_advantages(estimator: Estimator, groups: Sequence[Group]) -> list[list[NDArray[np.float64]]]:
    """Return [turns] float64 for each episode of each group; the groups are of one environment.

    The estimator compares the rewards of the same role. Its groups have the episodes in which the role had a turn.

    Raises:
        EnvironmentFault: the estimator raised, or returned the wrong number or kind of values.
    """
    turns = [turn for group in groups for episode in group.episodes for turn in episode.turns]
    if not any(turn.role is not None or turn.frozen for turn in turns):  # usually
        return _estimate_role(estimator, groups)
    rows = [[np.zeros(len(episode.turns)) for episode in group.episodes] for group in groups]
    for role in dict.fromkeys(turn.role for turn in turns if not turn.frozen):
        role_groups, targets = list[Group](), list[tuple[NDArray[np.float64], list[int]]]()
        for group, group_rows in zip(groups, rows, strict=True):
            views = [episode.seen_by(role) for episode in group.episodes]
            members = tuple([episode for episode, places in views if places])
            role_groups += [replace(group, episodes=members)] if members else []
            targets += [(row, places) for row, (_, places) in zip(group_rows, views, strict=True) if places]
        estimates = [row for group_rows in _estimate_role(estimator, role_groups) for row in group_rows]
        for (row, places), estimate in zip(targets, estimates, strict=True):
            row[places] = estimate
    return rows


def _estimate_role(estimator: Estimator, groups: Sequence[Group]) -> list[list[NDArray[np.float64]]]:
    env = groups[0].env
    with _name_in_errors(estimator, env):
        advantages: object = estimator.step_advantages(groups)
        rows = _as_list(advantages)
        if rows is None or len(rows) != len(groups):
            count = f"advantages for {0 if rows is None else len(rows)} of {len(groups)}"
            answer = f"{describe_type(advantages)} for the" if rows is None else count
            rule = f"it must return those of each group of the step, {len(groups)} here, in their order"
            title = f"the advantage estimator {estimator.title}"
            raise EnvironmentFault(f"{title} returned {answer} groups of {env}: {rule}")
        return [advantages_by_turn(row, group, title=estimator.title) for row, group in zip(rows, groups, strict=True)]


def estimate_metrics(estimator: Estimator, group: Group) -> Mapping[str, float]:
    """Return an estimator's metrics of a group; raise EnvironmentFault if it fails."""
    with _name_in_errors(estimator, group.env):
        return estimator.metrics(group)


@contextmanager
def _name_in_errors(estimator: Estimator, env: str) -> Generator[None]:
    """Turn an error of an estimator into an EnvironmentFault with its name."""
    try:
        yield
    except EnvironmentFault:
        raise
    except (Exception, SystemExit) as error:  # the user's own code
        problem = f"failed on a group of {env}: {describe_error(error)}"
        raise EnvironmentFault(f"the advantage estimator {estimator.title} {problem}") from error


def advantages_by_turn(advantages: object, group: Group, *, title: str) -> list[NDArray[np.float64]]:
    """Return the advantages by the estimator `title` as [turns] float64 for each episode of a group.

    Raise EnvironmentFault unless they are finite numbers within float32, one for each episode or turn.
    """
    count = len(group.episodes)
    numbers = f"{_plural(count, 'number')} for the {_plural(count, 'episode')} of a group of {group.env}"
    rule = f"it must return {numbers}, or as many arrays with a number for each turn"

    def fault(value: str, problem: str = rule) -> EnvironmentFault:
        return EnvironmentFault(f"the advantage estimator {title} returned {value}: {problem}")

    if (values := _as_list(advantages)) is None:
        raise fault(describe_type(advantages))
    if len(values) != count:
        raise fault(_plural(len(values), "advantage"))
    rows = list[NDArray[np.float64]]()
    for member, (value, episode) in enumerate(zip(values, group.episodes, strict=True)):
        row, turns = _as_array(value), len(episode.turns)
        if row is None:
            raise fault(f"{describe_type(value)} for episode {member}")
        row = np.full(turns, float(row)) if row.ndim == 0 else row
        if row.shape != (turns,):
            shape = " × ".join(map(str, row.shape))
            raise fault(f"{shape} advantages for the {_plural(turns, 'turn')} of episode {member}")
        if not np.isfinite(row).all():
            raise fault(f"{row[~np.isfinite(row)][0]:g} for episode {member}", f"{rule}, all of them finite")
        if (np.abs(row) > _ADVANTAGE_MAX).any():
            largest = f"an advantage of {row[np.abs(row).argmax()]:g} for a group of {group.env}"
            raise fault(f"{largest}, too large for float32", "scale the rewards down, or choose another advantage")
        rows.append(np.zeros(turns) if episode.reward is None or episode.masked else row)
    return rows


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _as_list(value: object) -> Sequence[object] | None:
    """Return the items of an array or sequence; None for any other value."""
    # the items of a mapping would be its keys
    if isinstance(value, str | bytes | Mapping) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        return None
    try:
        return list(cast("Sequence[object]", value))
    except TypeError:  # an array of no dimensions
        return None


def _as_array(value: object) -> NDArray[np.float64] | None:
    """Return a number or numbers as an array; None for any other value."""
    try:
        array: NDArray[np.generic] = np.asarray(value)
        return None if array.dtype.kind not in "biuf" else array.astype(np.float64)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor that requires a gradient
        return None
