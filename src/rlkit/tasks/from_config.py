"""The tasks of a run's environments, and the sources that draw them, from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlkit._util.seeds import derive_seed
from rlkit.config import load_envs
from rlkit.config.schema import Config
from rlkit.config.schema.envs import CurriculumConfig, FilterCurriculum, TargetCurriculum, refuse_turn_limit
from rlkit.env import SingleTurnEnv, TaskSource
from rlkit.errors import UsageError
from rlkit.tasks.curriculum import FilterSource, SolveRates, TargetSource, distinct_ids
from rlkit.tasks.decontamination import remove_evaluated
from rlkit.tasks.epochs import countable_tasks
from rlkit.tasks.provenance import TaskManifest
from rlkit.tasks.sources import Mixture, SequenceSource, Tasks, as_source, list_tasks


def run_tasks(
    config: Config,
    given: Mapping[str, Tasks],
    *,
    tested: Mapping[str, str],
    note: Callable[[str], None],
    origins: TaskManifest,
) -> dict[str, Tasks]:
    """Return the tasks of each environment of a run; those of a collection may be used again and again.

    Tasks of a collection that are evaluated are left out; a source of the user's own is left as it is.

    Args:
        config: the configuration of the run.
        given: tasks made in Python, by name; the others are loaded as the configuration says.
        tested: the result of `contents` for the evaluation.
        note: receives lines for the user.
        origins: record of what the tasks were made of when the run began.

    Raises:
        ConfigError: an environment cannot be loaded, or something is set that its tasks have no use for.
        UsageError: all tasks of an environment are evaluated.
    """
    loaded = dict[str, Tasks]()
    for name, spec in config.envs.items():
        field = f"envs.{name}"
        if name in given:
            made = given[name]
        else:
            made = load_envs(name, spec, field=field, seed=config.seed, note=note, recorded=origins.recorded(field))
        loaded[name] = made
        if not isinstance(made, TaskSource):
            envs = list_tasks(made)
            loaded[name] = kept = remove_evaluated(envs, tested, field=field) if tested else envs
            if len(kept) < len(envs):
                note(f"{field}: {len(envs) - len(kept)} tasks are evaluated, and not trained on")
    single = [name for name, tasks in loaded.items() if is_single_turn(tasks)]
    for name in single:
        refuse_turn_limit(config.envs[name], field=f"envs.{name}")
    config.refuse_turn_settings(set(single))
    return loaded


def is_single_turn(tasks: Tasks) -> bool:
    """Say whether each task is known to have a single turn; of a source of the user's own it is not."""
    if isinstance(tasks, TaskSource):
        return False
    return all(
        isinstance(env, SingleTurnEnv) and type(env).rollout is SingleTurnEnv.rollout for env in list_tasks(tasks)
    )


def run_mixture(config: Config, tasks: Mapping[str, Tasks]) -> Mixture:
    """Return the source of a run's tasks, a mixture of those of its environments; errors as of `task_source`."""
    sources = {
        name: task_source(
            tasks[name],
            spec.curriculum,
            field=f"envs.{name}.curriculum",
            seed=derive_seed(config.seed, "tasks", name),
            epochs=config.epochs,
        )
        for name, spec in config.envs.items()
    }
    weights = {name: spec.weight for name, spec in config.envs.items()} if config.epochs is None else None
    return Mixture(sources, weights=weights, seed=config.seed)


def task_source(
    tasks: Tasks, section: CurriculumConfig | None, *, field: str, seed: int, epochs: int | None = None
) -> TaskSource:
    """Return the source that chooses the next task of an environment.

    Args:
        tasks: the tasks of the environment.
        section: its curriculum.
        field: the field of the curriculum, for messages.
        seed: seed of the draws.
        epochs: times that each task is drawn; None for ever, and with a curriculum.

    Raises:
        UsageError: these are no tasks, or a curriculum has no use for them.
    """
    if epochs is not None:
        return SequenceSource(countable_tasks(tasks, field=field.rpartition(".")[0]), seed=seed, epochs=epochs)
    if section is None:
        return as_source(tasks, seed=seed)
    if isinstance(tasks, TaskSource) and not isinstance(tasks, Sequence):
        raise UsageError(
            f"{field}: has no effect: a {type(tasks).__name__} is a task source, which has no list of tasks and "
            "chooses by itself; leave the curriculum out, or give a collection of tasks"
        )
    envs = list_tasks(tasks)
    if len(envs) < 2:
        raise UsageError(f"{field}: has no effect: it chooses between tasks, and needs two at least, not {len(envs)}")
    try:
        rates = SolveRates(distinct_ids(envs), solved=section.solved, newest=section.newest)
    except UsageError as error:
        raise UsageError(f"{field}: {error}") from None
    match section:
        case FilterCurriculum(low=low, high=high, min_groups=least, recheck=epochs):
            return FilterSource(envs, rates, low=low, high=high, min_groups=least, recheck=epochs, seed=seed)
        case TargetCurriculum(target=target, sharpness=sharpness, explore=explore):
            return TargetSource(envs, rates, target=target, sharpness=sharpness, explore=explore, seed=seed)
