"""Tasks of a run, their sources, and the length of the run, from the configuration.

Invariants: a run of E epochs draws every task exactly E times; a task whose `content` is evaluated is not trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rlkit._util.seeds import derive_seed
from rlkit.config.loading.objects import list_envs, load_envs
from rlkit.config.schema import Config
from rlkit.config.schema.envs import CurriculumConfig, FilterCurriculum
from rlkit.env import Env, SingleTurnEnv, TaskSource
from rlkit.errors import ConfigError, UsageError
from rlkit.tasks.curriculum import FilterSource, TargetSource
from rlkit.tasks.provenance import TaskManifest
from rlkit.tasks.sources import Mixture, SequenceSource, Tasks


def load_tasks(
    config: Config,
    envs: Mapping[str, Tasks],
    *,
    evaluated: Mapping[str, str],
    note: Callable[[str], None],
    manifest: TaskManifest,
) -> dict[str, Tasks]:
    """Return the tasks of each environment: a task source, or a list without evaluated tasks.

    Args:
        envs: tasks made in Python, by environment; the others are loaded from the configuration.
        evaluated: result of `task_contents` for the evaluation.
        note: receives lines for the user.

    Raises:
        ConfigError: an environment cannot be loaded, or a setting has no effect on its tasks.
        UsageError: all tasks of an environment are evaluated.
    """
    if config.warm_start is not None:
        steps = manifest.setdefault("warm_start.steps", config.warm_start.steps)
        if steps != config.warm_start.steps:
            raise ConfigError(f"warm_start.steps: the run began with {steps}, and cannot go on with another number")
    tasks_by_env = dict[str, Tasks]()
    for name, spec in config.envs.items():
        field, tasks = config.find_field(name), envs.get(name)
        if tasks is None:
            pin = partial(manifest.setdefault, field)
            tasks = load_envs(name, spec, field=field, seed=config.seed, note=note, pin=pin)
        if not isinstance(tasks, TaskSource):
            collection = list_envs(tasks, subject=f"{field} is")
            tasks = remove_evaluated(collection, evaluated, field=field)
            if len(tasks) < len(collection):
                note(f"{field}: {len(collection) - len(tasks)} tasks are evaluated, and not trained on")
        tasks_by_env[name] = tasks
    config.refuse_turn_settings({name for name, tasks in tasks_by_env.items() if is_single_turn(tasks)})
    return tasks_by_env


def is_single_turn(tasks: Tasks) -> bool:
    """Return whether every task has a single turn; False for a task source, whose tasks are unknown."""
    if isinstance(tasks, TaskSource):
        return False
    envs = list_envs(tasks)
    return all(isinstance(env, SingleTurnEnv) and type(env).rollout is SingleTurnEnv.rollout for env in envs)


def task_contents(tasks: Mapping[str, Sequence[Env]]) -> Mapping[str, str]:
    """Map the `content` of tasks that have one to the name of their environment."""
    return {content: name for name, envs in tasks.items() for env in envs if (content := _content(env)) is not None}


def remove_evaluated[E: Env](envs: Sequence[E], evaluated: Mapping[str, str], *, field: str) -> Sequence[E]:
    """Return the tasks whose content is not evaluated; raise UsageError if no task is left.

    Args:
        evaluated: result of `task_contents` for the evaluation.
        field: configuration field of the environment.
    """
    contents = [_content(env) for env in envs]
    trained = [env for env, content in zip(envs, contents, strict=True) if content not in evaluated]
    if envs and not trained:
        names = sorted({f"eval.envs.{evaluated[content]}" for content in contents if content is not None})
        problem = f"all of its {len(envs)} tasks are evaluated too, as {', '.join(names)}"
        raise UsageError(f"{field}: {problem}; choose another split or dataset")
    return trained


def _content(env: Env) -> str | None:
    content: object = getattr(env, "content", None)
    return content if isinstance(content, str) else None


def count_draws(config: Config, tasks: Mapping[str, Tasks]) -> dict[str, int] | None:
    """Return the number of draws of each environment; None without `epochs`. Raise UsageError if it is unknown."""
    if config.epochs is None:
        return None
    draws = dict[str, int]()
    for name in tasks.keys() - {"warm_start"}:
        if _is_uncountable(tasks[name]):
            reason = f"a {type(tasks[name]).__name__} is a task source; set `steps` instead"
            raise UsageError(f"epochs: the number of tasks of envs.{name} is unknown, because {reason}")
        draws[name] = config.epochs * len(list_envs(tasks[name]))
    return draws


def resolve_steps(config: Config, tasks: Mapping[str, Tasks], *, note: Callable[[str], None]) -> Config:
    """Return the configuration with `steps` computed from `epochs`; the last step may have fewer groups.

    Raises:
        ConfigError: the learning rate's schedule or a teacher does not fit into the steps.
        UsageError: the number of tasks of an environment is unknown.
    """
    draws, epochs = count_draws(config, tasks), config.epochs
    if draws is None or epochs is None:
        return config
    total, groups = sum(draws.values()), config.batch.groups
    steps = math.ceil(total / groups)
    config = config.model_copy(update={"steps": steps})
    try:
        config.optimizer.check_steps(steps)
        for name, env in config.reinforced_envs.items():
            config.check_teachers(name, env)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    last = f", the last of them with {total % groups}" if total % groups else ""
    times = {1: "once", 2: "twice"}.get(epochs, f"{epochs} times")
    note(f"epochs: {total // epochs} tasks, each drawn {times}, are {steps} steps of {groups}{last}")
    return config


def make_mixture(config: Config, tasks: Mapping[str, Tasks]) -> Mixture:
    """Return the mixture of the task sources of a run; errors as in `task_source`."""
    sources = dict[str, TaskSource]()
    for name, spec in config.envs.items():
        field, seed = f"envs.{name}.curriculum", derive_seed(config.seed, "tasks", name)
        epochs = None if name == "warm_start" else config.epochs
        sources[name] = task_source(tasks[name], spec.curriculum, field=field, seed=seed, epochs=epochs)
    weights = {name: spec.weight for name, spec in config.envs.items()} if config.epochs is None else None
    first = "warm_start", config.warm_start_steps * config.batch.groups
    return Mixture(sources, weights=weights, seed=config.seed, first=first)


def task_source(
    tasks: Tasks, curriculum: CurriculumConfig | None, *, field: str, seed: int, epochs: int | None = None
) -> TaskSource:
    """Return the source that chooses the next task of an environment.

    Args:
        field: configuration field of the curriculum.
        epochs: number of draws of each task, which `count_draws` accepts; None for no end.

    Raises:
        UsageError: the value is not tasks, or a curriculum cannot choose between them.
    """
    if epochs is not None:
        return SequenceSource(list_envs(tasks), seed=seed, epochs=epochs)
    if curriculum is None:
        return tasks if isinstance(tasks, TaskSource) else SequenceSource(list_envs(tasks), seed=seed)
    if _is_uncountable(tasks):
        problem = f"a {type(tasks).__name__} is a task source, which has no list of tasks and chooses them itself"
        raise UsageError(f"{field}: has no effect: {problem}; remove the curriculum, or pass a collection of tasks")
    envs = list_envs(tasks)
    if len(envs) < 2:
        raise UsageError(f"{field}: has no effect: it needs at least two tasks to choose from, not {len(envs)}")
    try:
        if isinstance(curriculum, FilterCurriculum):
            return FilterSource(envs, curriculum, seed=seed)
        return TargetSource(envs, curriculum, seed=seed)
    except UsageError as error:
        raise UsageError(f"{field}: {error}") from None


def _is_uncountable(tasks: Tasks) -> bool:
    return isinstance(tasks, TaskSource) and not isinstance(tasks, Sequence)
