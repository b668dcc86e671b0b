"""Load environments by name: a built-in environment, `file.py:Name`, or the environments of a configuration file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import load_envs
from rlkit.config.loading.secrets import secret_warnings
from rlkit.env import Env, TaskSource
from rlkit.errors import UsageError
from rlkit.types import Json

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


def load_target(
    name: str, arguments: Sequence[str] = (), *, seed: int = 0, warn: Callable[[str], None] = lambda message: None
) -> dict[str, TaskSource | Sequence[Env]]:
    """Return the environments of a target; those of `eval.envs` have this prefix.

    Args:
        name: built-in environment, `file.py:Name`, or configuration file.
        arguments: `key=value`: fields of the configuration file, or arguments of the environment.
        warn: receives a line for each literal secret in the arguments of an environment.

    Raises:
        UsageError: the target does not exist or has only conversations, or its arguments are invalid.
    """
    is_file = Path(name).suffix in CONFIG_SUFFIXES
    # A single environment is loaded as a configuration, so that values are parsed and errors reported alike.
    settings = [f"envs.target.env={json.dumps(name)}", *(f"envs.target.args.{argument}" for argument in arguments)]
    resolved = load_config([Path(name)], arguments) if is_file else load_config([], settings)
    for env, spec in cast("dict[str, dict[str, dict[str, Json]]]", resolved.tree["envs"]).items():
        for warning in secret_warnings(spec["args"], field=f"envs.{env}.args" if is_file else "--args"):
            warn(warning)
    config = resolved.config
    sections = {"envs": config.reinforced_envs, "eval.envs": config.eval.envs}
    played = {f"{section}.{env}": (env, spec) for section, specs in sections.items() for env, spec in specs.items()}
    if not played:
        raise UsageError(f"{name}: conversations play nothing to look at; try them by rlkit train FILE --dry-run")
    if not is_file:
        return {name: load_envs(name, config.envs["target"], field="target", seed=seed)}
    with resolved.locate_errors():
        return {
            field.removeprefix("envs."): load_envs(env, spec, field=field, seed=config.seed)
            for field, (env, spec) in played.items()
        }
