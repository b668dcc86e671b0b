"""What a configuration means for the parts of a run.

Invariant: a part gets its own small settings and never the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlkit.chat import ChatFormat
from rlkit.config.schema import Config
from rlkit.policy import Limits
from rlkit.rollouts import EnvSettings
from rlkit.schedule import Pace
from rlkit.service import ServiceChoice
from rlkit.types import Sampling


def pace(config: Config) -> Pace:
    """How much a run plays ahead."""
    ahead = config.schedule.mode == "async"
    return Pace(
        groups=config.batch.groups,
        steps=config.steps,
        max_staleness=config.schedule.max_staleness if ahead else 0,
        in_order=config.schedule.staleness == "strict" if ahead else config.schedule.mode == "sync",
        replace=config.batch.replace_uninformative,
        replaced_max=config.batch.max_replaced or 4 * config.batch.groups,
    )


def describe(choice: ServiceChoice) -> str:
    """The chosen service as a phrase for people."""
    match choice.kind:
        case "hosted":
            return f"the hosted Tinker service ({choice.reason})"
        case "url":
            return f"the Tinker service at {choice.base_url} ({choice.reason})"
        case "engine":
            return f"the embedded engine ({choice.reason})"


def load_chat(config: Config, choice: ServiceChoice, note: Callable[[str], None]) -> ChatFormat:
    """The chat format of the configured model; with the embedded engine, the model itself is made ready first."""
    from rlkit.renderers import chat_format
    from rlkit.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(config.model, with_weights=choice.kind == "engine", note=note)
    return chat_format(config.model, tokenizer, renderer=config.chat.renderer)


def env_settings(config: Config, *, context: int | None) -> Mapping[str, EnvSettings]:
    """How each environment is played: its own settings over those of the run."""
    return {
        name: EnvSettings(
            group_size=(size := spec.group_size or config.batch.group_size),
            sampling=sampling(config, max_tokens=spec.max_tokens, temperature=spec.temperature),
            timeout_s=spec.timeout_s or config.rollouts.timeout_s,
            max_failing_rollouts=(
                config.rollouts.max_failing_rollouts if spec.max_failing_rollouts is None else spec.max_failing_rollouts
            ),
            limits=Limits(spec.max_turns, context),
            min_valid=min(size, config.rollouts.min_valid),
            coalesce=config.rollouts.coalesce,
            newest_weights=spec.newest_weights,
        )
        for name, spec in config.envs.items()
    }


def sampling(config: Config, *, max_tokens: int | None, temperature: float | None) -> Sampling:
    """How completions are drawn: an environment's own limits over the run's settings."""
    run = config.sampling
    return Sampling(
        max_tokens=max_tokens or run.max_tokens,
        temperature=run.temperature if temperature is None else temperature,
        top_p=run.top_p,
        top_k=run.top_k,
        stop=None if run.stop is None else tuple(run.stop),
    )
