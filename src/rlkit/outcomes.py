"""What an environment returned, checked.

Invariant: an outcome that passes holds finite numbers only, and what it says for people is JSON, so that it is the same
in memory as it is when it is read back.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from rlkit.errors import RewardError
from rlkit.types import Json, Outcome

_DEPTH_MAX = 32


def as_outcome(result: object) -> Outcome:
    """The outcome that a rollout returned; a bare number is one.

    Raises:
        RewardError: it is neither, a reward or metric is not a finite number, or `metrics` or `info` is no mapping.
    """
    outcome = result if isinstance(result, Outcome) else None
    reward = outcome.reward if outcome else result
    value = _real(reward)
    if value is None:
        raise RewardError(f"the environment returned {_shown(reward)}; a rollout returns an Outcome or a number")
    if not math.isfinite(value):
        raise RewardError(f"the environment returned the reward {value}; rewards must be finite")
    if outcome is None:
        return Outcome(value)
    return Outcome(value, _numbers(outcome.metrics), _information(outcome.info), outcome.truncated)


def _numbers(metrics: object) -> Mapping[str, float]:
    if not isinstance(metrics, Mapping):
        raise RewardError(f"the environment returned the metrics {_shown(metrics)}; metrics map names to numbers")
    checked = dict[str, float]()
    for name, value in cast("Mapping[object, object]", metrics).items():
        number = _real(value)
        if number is None or not math.isfinite(number):
            raise RewardError(
                f"the environment returned the metric {name} = {_shown(value)}; it must be a finite number"
            )
        checked[str(name)] = number
    return checked


def _information(info: object) -> Mapping[str, Json]:
    if not isinstance(info, Mapping):
        raise RewardError(f"the environment returned the info {_shown(info)}; info maps names to anything")
    return {_text(name): _json(value) for name, value in cast("Mapping[object, object]", info).items()}


def _json(value: object, depth: int = 0) -> Json:
    """The value as JSON; what JSON cannot hold becomes its `repr`."""
    match value:
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return float(value)
        case np.generic() if not isinstance(value, float):
            plain = cast("object", value.item())
            return str(cast("object", plain)) if isinstance(plain, np.generic) else _json(plain, depth)
        case Mapping() if depth < _DEPTH_MAX:
            items = cast("Mapping[object, object]", value).items()
            return {_text(name): _json(inner, depth + 1) for name, inner in items}
        case list() | tuple() if depth < _DEPTH_MAX:
            return [_json(inner, depth + 1) for inner in cast("Sequence[object]", value)]
        case _:
            return repr(value)


def _text(name: object) -> str:
    return name if isinstance(name, str) else repr(name)


def _real(value: object) -> float | None:
    """The value of a real number of Python or numpy; None for anything else."""
    number = cast("object", value.item()) if isinstance(value, np.generic) else value
    return float(number) if isinstance(number, numbers.Real) else None


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
