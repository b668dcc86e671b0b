"""What is said about turns, for environments of which it is known that each task has a single one.

Invariant: what has no effect is refused, once the tasks are there to tell.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from rlkit.errors import ConfigError

if TYPE_CHECKING:
    from rlkit.config.schema import Config, EnvConfig, EvalEnvConfig


def refuse_limit(spec: EnvConfig | EvalEnvConfig, *, field: str) -> None:
    """Raise ConfigError for a limit of turns of an environment whose tasks have a single turn."""
    if spec.max_turns is not None:
        raise ConfigError(f"{field}.max_turns: has no effect, since each of its tasks has a single turn; leave it out")


def refuse_turn_settings(config: Config, single: Set[str]) -> None:
    """Raise ConfigError for a setting of later turns, such as a discount, that no environment has use for.

    `single` are the environments whose tasks are known to have a single turn.
    """
    single = single | {name for name, spec in config.envs.items() if spec.max_turns == 1}
    for field, users in _turn_settings(config).items():
        if users <= single:
            raise ConfigError(
                f"{field}: has no effect, since each task of {', '.join(sorted(users))} has a single turn; leave it out"
            )


def _turn_settings(config: Config) -> dict[str, set[str]]:
    """By field, the environments that the setting is of."""
    own = [(f"envs.{name}.advantage", spec.advantage, {name}) for name, spec in config.envs.items()]
    inherit = {name for name, spec in config.envs.items() if spec.advantage is None}
    return {
        f"{field}.{setting}": users
        for field, section, users in [("advantage", config.advantage, inherit), *own]
        if section is not None
        for setting in section.turn_settings
        if not section.is_default(setting)
    }
