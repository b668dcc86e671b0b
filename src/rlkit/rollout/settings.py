"""Settings of rollouts, and their translation from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlkit.config.schema import Config
from rlkit.policy import Limits
from rlkit.types import BudgetForcing, Sampling


@dataclass(frozen=True, slots=True)
class EnvSettings:
    """Settings of the rollouts of an environment."""

    group_size: int  # rollouts per task
    sampling: Sampling
    timeout_s: float  # limit in seconds of a rollout; service outages do not count (see `Stopwatch`)
    max_retries: int  # failed episodes to play again, per group
    limits: Limits
    min_valid: int = 1  # minimum number of valid episodes of a usable group
    coalesce: Literal["single_turn", "always", "never"] = "never"  # groups that send their first turns as one request
    newest_weights: bool = True  # a running rollout uses newer weights from its next turn on
    endpoint_host: str | None = None  # see `Policy.endpoint_host`
    is_supervised: bool = False  # rollouts record conversations, and sample nothing


def make_env_settings(config: Config, *, context: int | None) -> Mapping[str, EnvSettings]:
    """Return the settings of each environment: its own over those of the run."""
    return {
        name: EnvSettings(
            group_size=(size := env.group_size or config.batch.group_size),
            sampling=make_sampling(config, max_tokens=env.max_tokens, temperature=env.temperature),
            timeout_s=env.timeout_s or config.rollouts.timeout_s,
            max_retries=config.rollouts.max_retries if env.max_retries is None else env.max_retries,
            limits=Limits(env.max_turns, context),
            min_valid=min(size, env.min_valid or config.rollouts.min_valid)
            if env.max_failing_rollouts is None
            else size - env.max_failing_rollouts,
            coalesce=config.rollouts.coalesce,
            newest_weights=env.newest_weights,
            endpoint_host=config.rollouts.endpoint_host,
            is_supervised=name not in config.reinforced_envs,
        )
        for name, env in config.envs.items()
    }


def make_sampling(config: Config, *, max_tokens: int | None, temperature: float | None) -> Sampling:
    """Return the sampling settings of an environment: its own over those of the run."""
    run, forcing = config.sampling, config.sampling.budget_forcing
    return Sampling(
        max_tokens=max_tokens or run.max_tokens,
        temperature=run.temperature if temperature is None else temperature,
        top_p=run.top_p,
        top_k=run.top_k,
        stop=None if run.stop is None else tuple(run.stop),
        forcing=None if forcing is None else BudgetForcing(forcing.phrase, forcing.context_window_tokens),
    )
