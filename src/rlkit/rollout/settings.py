"""Settings of rollouts, and their translation from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rlkit.config.schema import Config
from rlkit.config.schema.envs import EnvConfig, EvalEnvConfig
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
    run, settings = config.rollouts, dict[str, EnvSettings]()
    for name, env in config.envs.items():
        size, least = env.group_size or config.batch.group_size, env.min_valid or run.min_valid
        settings[name] = replace(
            make_shared_settings(config, env, size, context=context),
            max_retries=run.max_retries if env.max_retries is None else env.max_retries,
            min_valid=min(size, least) if env.max_failing_rollouts is None else size - env.max_failing_rollouts,
            newest_weights=env.newest_weights,
            is_supervised=name not in config.reinforced_envs,
        )
    return settings


def make_shared_settings(
    config: Config, env: EnvConfig | EvalEnvConfig, group_size: int, *, context: int | None
) -> EnvSettings:
    """Return the settings that training and evaluation share: those of an environment over those of the run."""
    run, rollouts, spec = config.sampling, config.rollouts, config.sampling.budget_forcing
    temperature = run.temperature if env.temperature is None else env.temperature
    stop = None if run.stop is None else tuple(run.stop)
    forcing = None if spec is None else BudgetForcing(spec.phrase, spec.context_window_tokens)
    sampling = Sampling(env.max_tokens or run.max_tokens, temperature, run.top_p, run.top_k, stop, forcing)
    timeout_s, limits = env.timeout_s or rollouts.timeout_s, Limits(env.max_turns, context)
    settings = EnvSettings(group_size, sampling, timeout_s, rollouts.max_retries, limits)
    return replace(settings, coalesce=rollouts.coalesce, endpoint_host=rollouts.endpoint_host)
