"""Checks of what an environment returned.

Invariant: an outcome that passes holds finite numbers and plain JSON only.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from rlkit._util.json_values import JsonBudget, NotJson, TooLarge, json_bytes, render_value, safe_str, to_json
from rlkit.errors import RewardError
from rlkit.types import Json, Outcome

INFO_BYTES = 2**20
"""Limit of an episode's info, as the JSON that is recorded."""


def as_outcome(result: object, *, of: str = "the environment") -> Outcome:
    """Return the outcome of a rollout, made from a bare number if it returned one.

    Args:
        result: what the rollout returned.
        of: name of the environment, for messages.

    Raises:
        RewardError: it is neither, a reward or metric is not a finite number, or the info is not JSON or too large.
    """
    outcome = result if isinstance(result, Outcome) else None
    reward = outcome.reward if outcome else result
    value = real(reward)
    if value is None:
        raise RewardError(f"{of} returned {render_value(reward)}; a rollout returns an Outcome or a number")
    if not math.isfinite(value):
        raise RewardError(f"{of} returned the reward {value}; rewards must be finite")
    if outcome is None:
        return Outcome(value)
    metrics, info = _metrics(outcome.metrics, of), _info(outcome.info, of)
    return Outcome(value, metrics, info, bool(outcome.truncated), bool(outcome.masked))


def as_scores(result: object, *, count: int, of: str) -> list[float] | None:
    """Return the rewards that the scoring of a group gave; None if it left them as they were.

    Args:
        result: what the scoring returned.
        count: number of episodes that were scored.
        of: name of the environment, for messages.

    Raises:
        RewardError: they are not as many finite numbers as there are episodes.
    """
    if result is None:
        return None
    scores = [real(value) for value in cast("Sequence[object]", result)] if isinstance(result, list | tuple) else []
    if len(scores) != count or not all(score is not None and math.isfinite(score) for score in scores):
        text = render_value(cast("object", result))
        raise RewardError(f"{of} scored {count} episodes as {text}; it must give a list with a finite number for each")
    return cast("list[float]", scores)


def real(value: object) -> float | None:
    """Return the value of a real number of Python or numpy; None for anything else."""
    number = cast("object", value.item()) if isinstance(value, np.generic) else value
    return float(number) if isinstance(number, numbers.Real) else None


def _metrics(metrics: object, of: str) -> Mapping[str, float]:
    if not isinstance(metrics, Mapping):
        raise RewardError(f"{of} returned the metrics {render_value(metrics)}; metrics map names to numbers")
    checked = dict[str, float]()
    for name, value in cast("Mapping[object, object]", metrics).items():
        number = real(value)
        if number is None or not math.isfinite(number):
            metric = f"{safe_str(name)} = {render_value(value)}"
            raise RewardError(f"{of} returned the metric {metric}; it must be a finite number")
        checked[safe_str(name)] = number
    return checked


def _info(info: object, of: str) -> Mapping[str, Json]:
    if not isinstance(info, Mapping):
        raise RewardError(f"{of} returned the info {render_value(info)}; info maps names to values")
    checked, room = dict[str, Json](), JsonBudget(INFO_BYTES)
    for key, value in cast("Mapping[object, object]", info).items():
        try:
            checked |= cast("dict[str, Json]", to_json({key: value}, room))
        except TooLarge as error:
            raise _too_large(of, f", of which {safe_str(key)!r} is a part") from error
        except NotJson as error:
            raise RewardError(f"{of} returned the info {safe_str(key)}, which cannot be recorded: {error}") from error
    if checked and json_bytes(checked) > INFO_BYTES:  # what is no ASCII takes up six bytes
        raise _too_large(of, "")
    return checked


def _too_large(of: str, part: str) -> RewardError:
    return RewardError(
        f"{of} returned an info of more than {INFO_BYTES:,} bytes of JSON (1 MiB){part}: write what is large to a "
        "file, and give its path"
    )
