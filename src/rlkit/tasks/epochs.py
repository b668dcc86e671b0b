"""Epochs as steps: how many tasks a run has, and how many steps draw each of them so many times.

Invariant: in a run of E epochs, every task of every environment is drawn E times, and none more often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rlkit.config.schema import Config
from rlkit.env import Env, TaskSource
from rlkit.errors import ConfigError, UsageError
from rlkit.tasks.sources import Tasks, list_tasks


def countable_tasks(tasks: Tasks, *, field: str) -> Sequence[Env]:
    """Return the tasks of the environment in `field` as a list; a UsageError refuses a task source, which has none."""
    if isinstance(tasks, TaskSource) and not isinstance(tasks, Sequence):
        raise UsageError(
            f"epochs: how many tasks {field} has is not known, since a {type(tasks).__name__} is a task source; say "
            "how long to train with `steps` instead"
        )
    return list_tasks(tasks)


def count_draws(config: Config, tasks: Mapping[str, Tasks]) -> dict[str, int] | None:
    """Return how many tasks a run draws of each environment; None without `epochs`. Errors as of `countable`."""
    if config.epochs is None:
        return None
    return {name: config.epochs * len(countable_tasks(own, field=f"envs.{name}")) for name, own in tasks.items()}


def with_steps(
    config: Config, tasks: Mapping[str, Tasks], *, note: Callable[[str], None] = lambda message: None
) -> Config:
    """Return the configuration with the number of steps that `epochs` come to, the last of them with the rest.

    Args:
        config: the configuration of the run; without `epochs` it stays as it is.
        tasks: the tasks of each environment.
        note: receives the length of the run, in a line.

    Raises:
        ConfigError: the learning rate has no use for so few steps.
        UsageError: the number of tasks of an environment is not known.
    """
    counts = count_draws(config, tasks)
    if counts is None:
        return config
    total, groups = sum(counts.values()), config.batch.groups
    steps = math.ceil(total / groups)
    try:
        config.optimizer.check_steps(steps)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    last = f", the last of them with {total % groups}" if total % groups else ""
    epochs = config.epochs or 1
    times = {1: "once", 2: "twice"}.get(epochs, f"{epochs} times")
    note(f"epochs: {total // epochs} tasks, each drawn {times}, are {steps} steps of {groups}{last}")
    return config.model_copy(update={"steps": steps})
