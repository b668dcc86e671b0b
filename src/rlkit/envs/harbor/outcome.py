"""Outcome of an episode, from the report of its trial.

Invariant: a reward comes from the verifier, or is a 0 that the configuration sets explicitly. A fault outside the model
gives no reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from rlkit.errors import (
    EnvironmentFault,
    MissingError,
    RlkitError,
    ServiceError,
    ServiceUnreachable,
    UsageError,
    did_you_mean,
)
from rlkit.types import Json, Outcome

type Rule = Literal["verify", "zero", "mask", "drop"]
"""`verify`: the verifier's reward counts. `zero`: the reward is 0. `mask`: the verifier's reward counts in the group,
and no token is trained on. `drop`: the episode failed, and is played again within the budget."""

type Cause = Literal["environment_error", "verifier_error", "service_error", "agent_error", "timeout", "overflow"]
"""Cause of a fault in a trial, gravest first: a timeout in a broken environment is not the model's fault."""

CAUSES: tuple[Cause, ...] = ("timeout", "overflow", "agent_error", "environment_error", "verifier_error")
"""Causes that have a metric."""

VERIFIER_ERRORS = frozenset({
    "IsADirectoryError", "RewardFileEmptyError", "RewardFileNotFoundError", "ValidationError",
    "VerifierOutputParseError", "VerifierTimeoutError",
})  # fmt: skip
"""Names of Harbor's errors for tests that timed out, or gave no number."""

AGENT_ERRORS = frozenset(["AgentTimeoutError", "NonZeroAgentExitCodeError"])
"""Names of Harbor's errors for an agent that timed out, or failed."""

FATAL_ERRORS: Mapping[str, type[RlkitError]] = {
    **{error.__name__: error for error in (MissingError, ServiceUnreachable, UsageError)},
    "ConfigError": UsageError,
}
"""Errors that a retry cannot fix, by name: they end the run regardless of the rules."""


@dataclass(frozen=True)
class Rules:
    """Reward rules for episodes whose trial had a fault, by cause.

    After a timeout or an overflow the finished work counts, so that a model learns to be in time. An error of the
    agent's own program, the environment, the verifier or the service says nothing about the model.
    """

    timeout: Rule = "verify"
    overflow: Rule = "verify"
    agent_error: Rule = "drop"
    environment_error: Rule = "drop"

    def __post_init__(self) -> None:
        if self.environment_error == "zero":
            raise UsageError(
                "on_environment_error: zero would punish the model for a fault outside it; use drop, mask or verify"
            )

    def get_rule(self, cause: Cause | None) -> Rule:
        """Return the rule for a cause; `verify` where there is none.

        An error of the verifier or the service has the rule for an error of the environment.
        """
        return "verify" if cause is None else asdict(self).get(cause, self.environment_error)


@dataclass(frozen=True)
class Reward:
    """Rule that computes the reward from the verifier's numbers: the number of a key, or a weighted sum."""

    key: str | None = None  # key of the reward; None for the only key, or `reward` if there are several
    weights: Mapping[str, float] | None = None  # weight of each key in the sum; None to use `key`

    def __post_init__(self) -> None:
        if self.key is not None and self.weights:
            raise UsageError("reward_key and reward_weights are both set: remove one of them")
        for key, weight in (self.weights or {}).items():
            if not math.isfinite(weight):
                raise UsageError(f"reward_weights.{key}: {weight} is not a weight; set a finite number")

    def compute(self, rewards: Mapping[str, float]) -> float:
        """Return the reward; raise EnvironmentFault if the verifier gave no number of a key."""
        if self.weights:
            return sum(weight * _get_number(rewards, key) for key, weight in self.weights.items())
        only_key = next(iter(rewards)) if len(rewards) == 1 else "reward"
        return _get_number(rewards, only_key if self.key is None else self.key)


def _get_number(rewards: Mapping[str, float], key: str) -> float:
    if key not in rewards:
        keys = ", ".join(sorted(rewards)) or "nothing"
        raise EnvironmentFault(
            f"the verifier gave no reward {key!r} but {keys}.{did_you_mean(key, rewards)} "
            "Choose one with reward_key or reward_weights"
        )
    return rewards[key]


def parse_rewards(rewards: Mapping[str, float | int]) -> dict[str, float]:
    """Return the verifier's numbers as floats; raise EnvironmentFault for a JSON integer that exceeds a float."""
    try:
        return {key: float(value) for key, value in rewards.items()}
    except OverflowError:
        raise EnvironmentFault("verifier_error: the verifier gave a number that is too large") from None


@dataclass(frozen=True)
class Report:
    """Result of a trial.

    Args:
        rewards: the verifier's numbers, if any.
        detail: description of the fault, or the reason why the agent stopped.
        error: class name of the exception, if any.
        truncated: True if a limit ended the agent's work.
    """

    rewards: Mapping[str, float | int] | None
    cause: Cause | None = None
    detail: str = ""
    error: str | None = None
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])


def make_outcome(report: Report, rules: Rules, reward: Reward) -> Outcome:
    """Return the outcome of an episode, or raise the error of its failure.

    Raises:
        EnvironmentFault: the rule is `drop`, or there is no reward.
        ServiceError: the service failed, and the rule is `drop`.
    """
    if (fatal := FATAL_ERRORS.get(report.error or "")) is not None:
        raise fatal(report.detail)
    rule, rewards = rules.get_rule(report.cause), parse_rewards(report.rewards or {})
    if rule == "zero":
        value = 0.0
    elif rule == "drop" or report.rewards is None:
        if report.cause == "service_error":
            raise ServiceError(report.detail)
        error = f"{report.error}: " if report.error else ""
        detail = report.detail or "the verifier gave no reward"
        raise EnvironmentFault(f"{report.cause or 'verifier_error'}: {error}{detail}")
    else:
        value = reward.compute(rewards)
    reward_metrics = {f"rewards/{key}": number for key, number in rewards.items()}
    causes = {cause: float(report.cause == cause) for cause in CAUSES}
    return Outcome(
        reward=value,
        metrics={**report.metrics, **causes, **reward_metrics},
        info=report.info,
        truncated=report.truncated,
        masked=rule == "mask",
    )
