"""From what became of a trial to the outcome of an episode.

Invariant: a reward is what the verifier said, or a 0 that the configuration asks for by name. What broke beside the
model is no reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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
"""`verify`: what the verifier says counts. `zero`: the reward is 0. `mask`: what the verifier says counts in the group,
and no token is trained on. `drop`: the episode failed, and is played again within the budget."""

type Cause = Literal["environment_error", "verifier_error", "service_error", "agent_error", "timeout", "overflow"]
"""Why a trial did not go as it should."""

CAUSES: tuple[Cause, ...] = ("timeout", "overflow", "agent_error", "environment_error", "verifier_error")
"""Those that have a metric of their own."""

# fmt: off
VERIFIER_ERRORS = frozenset([
    "IsADirectoryError", "RewardFileEmptyError", "RewardFileNotFoundError", "ValidationError",
    "VerifierOutputParseError", "VerifierTimeoutError",
])
# fmt: on
"""What Harbor raises of tests that took too long, or gave no number."""

AGENT_ERRORS = frozenset(["AgentTimeoutError", "NonZeroAgentExitCodeError"])
"""What Harbor raises of an agent that took too long, or failed."""

UNMENDABLE: dict[str, type[RlkitError]] = {
    "ConfigError": UsageError,
    "MissingError": MissingError,
    "ServiceUnreachable": ServiceUnreachable,
    "UsageError": UsageError,
}
"""What no repetition mends, by the names of errors: it ends the run, whatever the rules say."""


@dataclass(frozen=True)
class Rules:
    """What an episode is worth whose trial did not go as it should.

    Args:
        timeout: the agent's time was over. The work that it has done counts, so that a model learns to be in time.
        overflow: the context was full. Likewise.
        agent_error: the agent's own program failed, which says nothing about the model.
        environment_error: the environment, the verifier or the service failed, which says nothing either.
    """

    timeout: Rule = "verify"
    overflow: Rule = "verify"
    agent_error: Rule = "drop"
    environment_error: Rule = "drop"

    def __post_init__(self) -> None:
        if self.environment_error == "zero":
            raise UsageError(
                "on_environment_error: zero would punish the model for what broke beside it; take drop, mask or verify"
            )

    def of(self, cause: Cause | None) -> Rule:
        """The rule for a cause; without one, what the verifier says counts."""
        match cause:
            case None:
                return "verify"
            case "timeout":
                return self.timeout
            case "overflow":
                return self.overflow
            case "agent_error":
                return self.agent_error
            case "environment_error" | "verifier_error" | "service_error":
                return self.environment_error


@dataclass(frozen=True)
class Reward:
    """How the numbers of a verifier become one.

    Args:
        key: which of them it is; None for `reward`, or for the only one.
        weights: by key; the reward is the weighted sum. Null or empty for `key`.
    """

    key: str | None = None
    weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.key is not None and self.weights:
            raise UsageError("reward_key and reward_weights are both given: leave one of them out")
        for key, weight in (self.weights or {}).items():
            if not math.isfinite(weight):
                raise UsageError(f"reward_weights.{key}: {weight} is no weight; give a finite number")

    def of(self, rewards: Mapping[str, float]) -> float:
        """The reward.

        Raises:
            EnvironmentFault: the verifier has not said what is asked for.
        """
        if self.weights:
            return sum(weight * _found(rewards, key) for key, weight in self.weights.items())
        if self.key is not None:
            return _found(rewards, self.key)
        if "reward" in rewards or len(rewards) != 1:
            return _found(rewards, "reward")
        return next(iter(rewards.values()))


def _found(rewards: Mapping[str, float], key: str) -> float:
    if key not in rewards:
        given = ", ".join(sorted(rewards)) or "nothing"
        raise EnvironmentFault(
            f"the verifier gave no reward {key!r} but {given}.{did_you_mean(key, rewards)} "
            "Say which counts with reward_key or reward_weights"
        )
    return rewards[key]


def numbers(said: Mapping[str, float | int]) -> dict[str, float]:
    """What a verifier said, as numbers that can be reckoned with.

    Raises:
        EnvironmentFault: one is too large: JSON has whole numbers of any length.
    """
    try:
        return {key: float(value) for key, value in said.items()}
    except OverflowError:
        raise EnvironmentFault("verifier_error: the verifier gave a number that is too large") from None


@dataclass(frozen=True)
class Report:
    """What became of a trial.

    Args:
        rewards: what the verifier said; None where it said nothing.
        cause: what went wrong; None where nothing did.
        detail: the same in words, or why the agent stopped.
        error: the name of the exception, where there was one.
        cut: a limit ended the agent's work.
        metrics: of the agent and of the phases.
        info: for people.
    """

    rewards: Mapping[str, float | int] | None
    cause: Cause | None = None
    detail: str = ""
    error: str | None = None
    cut: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])


def outcome(report: Report, rules: Rules, reward: Reward) -> Outcome:
    """The outcome of an episode.

    Raises:
        EnvironmentFault: it failed.
        ServiceError: the service did, and the rule says `drop`.
        UsageError: the task and this machine do not fit together.
        MissingError: something that has to be installed is not there.
    """
    if (unmendable := UNMENDABLE.get(report.error or "")) is not None:
        raise unmendable(report.detail)
    rule, said = rules.of(report.cause), numbers(report.rewards or {})
    if rule == "zero":
        value = 0.0
    elif rule == "drop" or report.rewards is None:
        raise _failure(report)
    else:
        value = reward.of(said)
    rewards = {f"rewards/{key}": one for key, one in said.items()}
    causes = {cause: float(report.cause == cause) for cause in CAUSES}
    return Outcome(
        reward=value,
        metrics={**report.metrics, **causes, **rewards},
        info=report.info,
        truncated=report.cut,
        masked=rule == "mask",
    )


def _failure(report: Report) -> Exception:
    if report.cause == "service_error":
        return ServiceError(report.detail)
    error = f"{report.error}: " if report.error else ""
    return EnvironmentFault(
        f"{report.cause or 'verifier_error'}: {error}{report.detail or 'the verifier gave no reward'}"
    )
