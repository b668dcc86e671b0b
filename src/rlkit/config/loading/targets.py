"""Environments by one word: those of a configuration file, or one that is built in or in a file of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import load_envs
from rlkit.config.loading.secrets import secret_warnings

if TYPE_CHECKING:
    from rlkit.env import Env, TaskSource
    from rlkit.types import Json

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


def load_target(
    name: str, arguments: Sequence[str] = (), *, seed: int = 0, warn: Callable[[str], None] = lambda message: None
) -> dict[str, TaskSource | Sequence[Env]]:
    """Make the environments that a word names.

    Args:
        arguments: `key=value`: fields of the file's configuration, or arguments of the environment.
        warn: receives a line for each secret that is written out in the arguments of an environment.

    Raises:
        UsageError: it names nothing, or cannot be made with these arguments.
    """
    is_file = Path(name).suffix in CONFIG_SUFFIXES
    # One environment is a configuration of its own, so that values mean and errors say what they do everywhere else.
    settings = [f"envs.target.env={json.dumps(name)}", *(f"envs.target.args.{argument}" for argument in arguments)]
    resolved = load_config([Path(name)], arguments) if is_file else load_config([], settings)
    for env, spec in cast("dict[str, dict[str, dict[str, Json]]]", resolved.tree["envs"]).items():
        for warning in secret_warnings(spec["args"], field=f"envs.{env}.args" if is_file else "--args"):
            warn(warning)
    config = resolved.config
    if not is_file:
        return {name: load_envs(name, config.envs["target"], field="target", seed=seed)}
    return {env: load_envs(env, spec, field=f"envs.{env}", seed=config.seed) for env, spec in config.envs.items()}
