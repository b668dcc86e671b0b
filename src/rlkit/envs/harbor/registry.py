"""Datasets of Harbor's registries.

Invariant: all tasks are on this machine before the first of them is played.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.errors import MissingError, RlkitError, UsageError

if TYPE_CHECKING:
    from harbor.models.trial.config import TaskConfig

    from rlkit.envs.harbor.tasks import Selection


def fetch(dataset: str, selection: Selection, *, registry: str | None) -> dict[str, Path]:
    """Download the tasks of a dataset that are chosen; Harbor keeps them in its cache.

    Args:
        dataset: `name@version`, `name==version`, `name`, or `organisation/name@ref` for a package.
        selection: of its tasks.
        registry: a file or a URL; None for Harbor's own.

    Returns:
        The folders, by the names of the tasks.

    Raises:
        MissingError: the registry cannot be reached, or has no such dataset.
        UsageError: nothing is chosen.
    """
    try:
        at = registry if registry is None or "://" in registry else str(Path(registry).expanduser())
        return _in_a_loop_of_its_own(_fetch(dataset, selection, at))
    except RlkitError:
        raise
    except Exception as error:  # of the network, of git, of files, or Harbor's own
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise MissingError(
            f"dataset: {dataset} cannot be had from {registry or "Harbor's registry"} ({why}): check the name and the "
            "network, or give the folder of its tasks as tasks_dir"
        ) from error


def parsed(dataset: str) -> tuple[str, str | None]:
    """The name and the version of a dataset, which may be missing.

    Raises:
        UsageError: it is of no such form.
    """
    name, _, version = dataset.replace("==", "@").partition("@")
    if not name.strip() or "@" in version:
        raise UsageError(f"dataset: {dataset!r} is not of the form name@version")
    return name.strip(), version.strip() or None


async def _fetch(dataset: str, selection: Selection, registry: str | None) -> dict[str, Path]:
    from harbor.models.job.config import DatasetConfig
    from harbor.tasks.client import TaskClient

    name, version = parsed(dataset)
    remote = registry is not None and "://" in registry
    packaged = "/" in name
    config = DatasetConfig(
        name=name,
        version=None if packaged else version,
        ref=version if packaged else None,
        registry_url=registry if remote else None,
        registry_path=None if registry is None or remote else Path(registry),
    )
    listed = await config.get_task_configs()
    tasks = {_name(task): task for task in listed}
    if len(tasks) < len(listed):
        name, count = Counter(map(_name, listed)).most_common(1)[0]
        raise MissingError(f"dataset: {dataset} has {count} tasks named {name!r}: give their folders as tasks_dir")
    chosen = [tasks[one] for one in selection.of(list(tasks))]
    fetched = await TaskClient().download_tasks(task_ids=[task.get_task_id() for task in chosen])
    return {_name(task): path for task, path in zip(chosen, _paths(fetched.paths), strict=True)}


def _paths(paths: Sequence[Path]) -> list[Path]:
    return [path.expanduser().absolute() for path in paths]


def _name(task: TaskConfig) -> str:
    return task.get_task_id().get_name()


def _in_a_loop_of_its_own[T](work: Coroutine[object, object, T]) -> T:
    """Tasks are loaded by an ordinary function, which an event loop may be waiting for."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
