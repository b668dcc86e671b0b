"""Validation of results that environments return.

Invariant: a validated outcome holds only finite numbers and plain JSON.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from rlkit._util.json_values import JsonBudget, NotJson, TooLarge, json_bytes, render_value, safe_str, to_json
from rlkit.errors import RewardError
from rlkit.types import Json, Outcome, Turn

INFO_BYTES = 2**20  # limit of an episode's info as JSON


def as_outcome(result: object, *, env: str = "the environment", turns: Sequence[Turn] = ()) -> Outcome:
    """Return the result of a rollout as an outcome.

    Args:
        env: name of the environment for messages.

    Raises:
        RewardError: the result has another type, a reward or metric is not finite, the rewards are not those of the
            roles that played, or the info is no JSON or too large.
    """
    if inspect.iscoroutine(result):
        result.close()
        raise RewardError(f"{env} returned a coroutine: await it in rollout; the grade of a SingleTurnEnv is not async")
    outcome = result if isinstance(result, Outcome) else Outcome(cast("float", result))
    value, rewards = as_float(outcome.reward), _check_numbers(outcome.rewards, env, "reward", "roles")
    if value is None:
        place = "an Outcome with the reward " if outcome is result else ""
        raise RewardError(
            f"{env} returned {place}{render_value(outcome.reward)}; a rollout returns an Outcome or a number"
        )
    if not math.isfinite(value):
        raise RewardError(f"{env} returned the reward {value}; rewards must be finite")
    metrics, info = _check_numbers(outcome.metrics, env, "metric", "names"), _check_info(outcome.info, env)
    _check_roles(rewards, env, turns)
    return Outcome(value, metrics, info, bool(outcome.truncated), bool(outcome.masked), rewards)


def as_scores(result: object, *, count: int, env: str) -> list[float] | None:
    """Return the scores of a group, `count` finite numbers or None for no change; raise RewardError for others."""
    if result is None:
        return None
    scores = [as_float(value) for value in cast("Sequence[object]", result)] if isinstance(result, list | tuple) else []
    if len(scores) != count or not all(score is not None and math.isfinite(score) for score in scores):
        text = render_value(cast("object", result))
        raise RewardError(f"{env} scored {count} episodes as {text}; return a list with a finite number for each")
    return cast("list[float]", scores)


def as_float(value: object) -> float | None:
    """Return a real number of Python or numpy as a float; None for anything else."""
    number = cast("object", value.item()) if isinstance(value, np.generic) else value
    return float(number) if isinstance(number, numbers.Real) else None


def _check_numbers(values: object, env: str, kind: str, names: str) -> Mapping[str, float]:
    if not isinstance(values, Mapping):
        raise RewardError(f"{env} returned the {kind}s {render_value(values)}; {kind}s map {names} to numbers")
    checked = dict[str, float]()
    for name, value in cast("Mapping[object, object]", values).items():
        if (number := as_float(value)) is None or not math.isfinite(number):
            pair = f"{safe_str(name)} = {render_value(value)}"
            raise RewardError(f"{env} returned the {kind} {pair}; it must be a finite number")
        checked[safe_str(name)] = number
    return checked


def _check_roles(rewards: Mapping[str, float], env: str, turns: Sequence[Turn]) -> None:
    """Raise RewardError unless each role with a turn to train has a reward, and no other has one."""
    roles = dict.fromkeys(turn.role for turn in turns if not turn.frozen)
    for role in {**dict.fromkeys(rewards), **roles} if rewards else ():
        if role is None:
            fix = "take them from policy.role(name), or return only the episode's reward"
            raise RewardError(f"{env} returned rewards of roles, and has turns without one: {fix}")
        if role not in rewards:
            raise RewardError(f"{env} returned no reward of the role {role}, which has turns: rewards name each role")
        if role not in roles:
            names = ", ".join(map(str, roles)) or "none"
            problem = f"a reward of the role {role}, which has no turn to train; roles with turns: {names}"
            raise RewardError(f"{env} returned {problem}")


def _check_info(info: object, env: str) -> Mapping[str, Json]:
    if not isinstance(info, Mapping):
        raise RewardError(f"{env} returned the info {render_value(info)}; info maps names to values")
    checked, room = dict[str, Json](), JsonBudget(INFO_BYTES)
    for key, value in cast("Mapping[object, object]", info).items():
        try:
            checked |= cast("dict[str, Json]", to_json({key: value}, room))
        except TooLarge as error:
            raise _too_large(env, f" at the key {safe_str(key)!r}") from error
        except NotJson as error:
            raise RewardError(f"{env} returned the info {safe_str(key)}, which cannot be recorded: {error}") from error
    if checked and json_bytes(checked) > INFO_BYTES:  # a character outside ASCII takes six bytes
        raise _too_large(env, "")
    return checked


def _too_large(env: str, place: str) -> RewardError:
    fix = "write large data to a file, and return its path"
    return RewardError(f"{env} returned an info of more than {INFO_BYTES:,} bytes of JSON (1 MiB){place}: {fix}")
