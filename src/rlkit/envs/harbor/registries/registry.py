"""Datasets of registries: Harbor's and terminal-bench 1's.

Invariant: all tasks are on this machine before the first rollout. Harbor's own client reads registries in Harbor's
format.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit._util.paths import expand_user
from rlkit._util.redaction import show_url
from rlkit._util.threads import run_in_new_loop
from rlkit.envs.harbor.registries.registry_files import read_rows
from rlkit.envs.harbor.terminal_bench.entries import REGISTRY_URL, find_entry, is_published
from rlkit.errors import MissingError, RlkitError, UsageError
from rlkit.types import Json

if TYPE_CHECKING:
    from harbor.models.trial.config import TaskConfig

    from rlkit.envs.harbor.tasks import Selection


def fetch(
    dataset: str,
    selection: Selection,
    *,
    registry: str | None,
    note: Callable[[str], None] = lambda message: None,
    pin: Callable[[Json], Json] = lambda now: now,
) -> dict[str, Path]:
    """Download the selected tasks of a dataset unless they are on this machine; return their folders by name.

    Args:
        dataset: `name@version`, `name==version`, `name`, or `organisation/name@ref` for a Harbor package.
        registry: file or URL, in the format of Harbor or terminal-bench 1. None for the published registry with the
            dataset: terminal-bench 1's if it lists this name and version, otherwise Harbor's.
        note: called with progress, and with differences between a task and its terminal-bench 1 original.
        pin: returns the commit at the run's start, given the newest one of a version that follows a branch.

    Raises:
        MissingError: the registry or a repository cannot be reached, or Harbor's registry has no such dataset.
        UsageError: no task is selected, or the registry cannot be read or has no such dataset.
    """
    from harbor.constants import DEFAULT_REGISTRY_URL

    name, version = parse_dataset(dataset)
    source = registry or (REGISTRY_URL if is_published(name, version) else None)
    if source in (None, DEFAULT_REGISTRY_URL):
        return _fetch_from_harbor(dataset, selection, None, registry_name="Harbor's registry")
    rows = read_rows(source, note=note)
    entries = [row for row in rows if "github_url" in row]  # rows of Harbor list tasks instead
    others = [row for row in rows if "github_url" not in row]
    if not entries or (others and not any(row["name"] == name for row in entries)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "registry.json"
            path.write_text(json.dumps(others), encoding="utf-8")
            return _fetch_from_harbor(dataset, selection, path, registry_name=show_url(source))
    from rlkit.envs.harbor.terminal_bench.dataset import select_tasks

    entry = find_entry(entries, name, version, registry=show_url(source))
    return select_tasks(entry, selection, note=note, pin_commit=pin)


def parse_dataset(dataset: str) -> tuple[str, str | None]:
    """Split `name@version` into the name and the version, None if missing; raise a UsageError for other forms."""
    name, _, version = dataset.replace("==", "@").partition("@")
    if not name.strip() or "@" in version:
        raise UsageError(f"dataset: {dataset!r} is not of the form name@version")
    return name.strip(), version.strip() or None


def _fetch_from_harbor(dataset: str, selection: Selection, path: Path | None, *, registry_name: str) -> dict[str, Path]:
    try:
        return run_in_new_loop(_fetch(dataset, selection, path))
    except RlkitError:
        raise
    except Exception as error:  # of the network, of git, of files, or Harbor's own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise MissingError(
            f"dataset: {dataset} cannot be fetched from {registry_name} ({reason}): check the name and the network, or "
            "set tasks_dir to the folder of its tasks"
        ) from error


async def _fetch(dataset: str, selection: Selection, path: Path | None) -> dict[str, Path]:
    from harbor.models.job.config import DatasetConfig
    from harbor.tasks.client import TaskClient

    name, version = parse_dataset(dataset)
    field = "ref" if "/" in name else "version"  # a package has an organisation in its name
    config = DatasetConfig.model_validate({"name": name, field: version, "registry_path": path})
    configs = await config.get_task_configs()
    tasks = {_get_name(task): task for task in configs}
    if len(tasks) < len(configs):
        name, count = Counter(map(_get_name, configs)).most_common(1)[0]
        raise MissingError(f"dataset: {dataset} has {count} tasks named {name!r}: set tasks_dir to their folder")
    selected = [tasks[name] for name in selection.select(list(tasks))]
    downloads = await TaskClient().download_tasks(task_ids=[task.get_task_id() for task in selected])
    return {_get_name(task): expand_user(path).absolute() for task, path in zip(selected, downloads.paths, strict=True)}


def _get_name(task: TaskConfig) -> str:
    return task.get_task_id().get_name()
