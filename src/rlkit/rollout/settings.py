"""Settings of rollouts, from the configuration of a run and of its environments."""

from __future__ import annotations

from collections.abc import Mapping

from rlkit.config.schema import Config, EnvConfig
from rlkit.policy import Limits
from rlkit.rollout.player import EnvSettings
from rlkit.types import BudgetForcing, Sampling


def make_env_settings(config: Config, *, context: int | None) -> Mapping[str, EnvSettings]:
    """Return the settings of each environment: its own over those of the run."""
    return {
        name: EnvSettings(
            group_size=(size := spec.group_size or config.batch.group_size),
            sampling=make_sampling(config, max_tokens=spec.max_tokens, temperature=spec.temperature),
            timeout_s=spec.timeout_s or config.rollouts.timeout_s,
            max_retries=config.rollouts.max_retries if spec.max_retries is None else spec.max_retries,
            limits=Limits(spec.max_turns, context),
            min_valid=_required_valid(spec, size=size, default=config.rollouts.min_valid),
            coalesce=config.rollouts.coalesce,
            newest_weights=spec.newest_weights,
        )
        for name, spec in config.envs.items()
    }


def _required_valid(spec: EnvConfig, *, size: int, default: int) -> int:
    """Return the episodes with a reward that a group of `size` must have."""
    if spec.max_failing_rollouts is not None:
        return size - spec.max_failing_rollouts
    return min(size, spec.min_valid or default)


def make_sampling(config: Config, *, max_tokens: int | None, temperature: float | None) -> Sampling:
    """Return the sampling settings of an environment: its own limits over the run's settings."""
    run = config.sampling
    forcing = run.budget_forcing
    return Sampling(
        max_tokens=max_tokens or run.max_tokens,
        temperature=run.temperature if temperature is None else temperature,
        top_p=run.top_p,
        top_k=run.top_k,
        stop=None if run.stop is None else tuple(run.stop),
        forcing=None if forcing is None else BudgetForcing(forcing.phrase, forcing.context_window_tokens),
    )
