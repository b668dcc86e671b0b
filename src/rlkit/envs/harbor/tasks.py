"""Search for task folders, and selection of tasks.

Invariant: the split of a task (training or evaluation) depends only on its id, or on a list of names. The two splits
therefore never share a task, whatever else is selected, added or shuffled.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from rlkit._util.paths import expand_user
from rlkit._util.seeds import derive_seed
from rlkit.errors import UsageError

TASK_FILE = "task.toml"
OLD_TASK_FILE = "task.yaml"
"""Task file of terminal-bench 1."""

EVAL_FRACTION = 0.2  # default share of the evaluation split
_MAX_DEPTH = 3  # depth of a task below the search folder: datasets, and collections of datasets
_IDS_SHOWN = 5

type Split = Literal["all", "train", "eval"]


@dataclass(frozen=True)
class Selection:
    """A selection of tasks."""

    task_ids: Sequence[str] = ()  # globs for whole ids or for their last parts; empty for all tasks
    exclude: Sequence[str] = ()  # globs of tasks to exclude
    split: Split = "all"  # `eval` for the tasks held out for evaluation, `train` for the rest
    eval_fraction: float | None = None  # approximate share of held-out tasks, by a hash of their ids; None for a fifth
    eval_tasks: Sequence[str] = ()  # globs of the held-out tasks, instead of a share
    max_tasks: int | None = None  # maximum number of tasks, after shuffling; None for all
    shuffle: bool = True  # order the tasks by `seed` instead of by id
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split == "all" and (self.eval_fraction is not None or self.eval_tasks):
            name = "eval_tasks" if self.eval_tasks else "eval_fraction"
            raise UsageError(f"{name} has no effect on all tasks: set split to train or eval, or leave it out")
        if self.eval_tasks and self.eval_fraction is not None:
            raise UsageError("eval_fraction has no effect with eval_tasks: leave one of them out")

    def select(self, task_ids: Sequence[str]) -> list[str]:
        """Return the ids of the selected tasks, in the order in which they are played.

        Raises:
            UsageError: there are no tasks, none is selected, or a glob matches nothing.
        """
        if not task_ids:
            raise UsageError("the dataset has no tasks")
        for field, globs in (("task_ids", self.task_ids), ("exclude", self.exclude), ("eval_tasks", self.eval_tasks)):
            for glob in globs:
                if not any(_matches(task_id, glob) for task_id in task_ids):
                    raise UsageError(f"{field}: no task matches {glob!r}.{_suggest_ids(glob, task_ids)}")
        named = [task_id for task_id in task_ids if not self.task_ids or _matches_any(task_id, self.task_ids)]
        included = [task_id for task_id in named if not _matches_any(task_id, self.exclude)]
        if not included:
            raise UsageError(f"exclude: all of the {len(named)} selected tasks are excluded")
        selected = sorted(filter(self._is_in_split, included))
        if not selected:
            fix = "" if self.eval_tasks else ": change eval_fraction, or name the tasks with eval_tasks"
            raise UsageError(f"split: none of the {len(included)} selected tasks is in the split {self.split}{fix}")
        if self.shuffle:
            selected.sort(key=lambda task_id: derive_seed(self.seed, "harbor", "order", task_id))
        return selected[: self.max_tasks]

    def _is_in_split(self, task_id: str) -> bool:
        return self.split == "all" or (self.split == "eval") == self._is_held_out(task_id)

    def _is_held_out(self, task_id: str) -> bool:
        if self.eval_tasks:
            return _matches_any(task_id, self.eval_tasks)
        fraction = EVAL_FRACTION if self.eval_fraction is None else self.eval_fraction
        return derive_seed(0, "harbor", "split", task_id) < fraction * 2**31


def find_tasks(folder: Path, *, field: str = "tasks_dir") -> dict[str, Path]:
    """Find the folders of tasks in `folder`, by id: the relative path, or the name of `folder` if it is itself a task.

    Raises:
        UsageError: the folder does not exist or has no tasks.
    """
    folder = expand_user(folder).absolute()
    if not folder.is_dir():
        near = difflib.get_close_matches(folder.name, [path.name for path in folder.parent.glob("*/")], n=1)
        hint = f" Did you mean {str(folder.with_name(near[0]))!r}?" if near else ""
        raise UsageError(f"{field}: there is no folder {folder}.{hint}")
    if (folder / TASK_FILE).is_file():
        return {folder.name: folder}
    tasks = _deduplicate(folder, _walk(folder, _MAX_DEPTH))
    if not tasks:
        if old := [path for path in (folder, *_list_folders(folder)) if (path / OLD_TASK_FILE).is_file()]:
            raise UsageError(
                f"{field}: {old[0]} is a task of terminal-bench 1: "
                f"run `rlkit tasks convert {folder} --to DIR`, and use that folder"
            )
        raise UsageError(f"{field}: no folder in {folder} has a {TASK_FILE}")
    return tasks


def require_readable(tasks: Mapping[str, Path]) -> None:
    """Let Harbor read the tasks before a run begins; UsageError if a task cannot be read."""
    for name, path in tasks.items():
        if (fault := find_task_fault(path)) is not None:
            raise UsageError(
                f"tasks_dir: the task {name} cannot be read: {fault.rstrip('.')}. Fix it, or exclude it with exclude"
            )


def find_task_fault(path: Path) -> str | None:
    """Return a one-line reason why Harbor cannot play a task: an unreadable file or empty instruction; or None."""
    from harbor.models.task.task import Task

    from rlkit.envs.harbor.verification.sealing import TestedWork

    try:
        task = Task(path)
        TestedWork.of(task.config.metadata)
        texts = {"instruction.md": task.instruction}
        if steps := task.config.steps:
            texts = {f"steps/{step.name}/instruction.md": task.step_instruction(step.name) for step in steps}
    except Exception as error:  # Harbor's errors have no common class; all describe the task's files
        return " ".join(f"{type(error).__name__}: {error}".split())
    return next((f"{name} is empty" for name, text in texts.items() if not text.strip()), None)


def join_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - _IDS_SHOWN} more" if len(names) > _IDS_SHOWN else ""
    return ", ".join(names[:_IDS_SHOWN]) + more


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    for path in _list_folders(folder):
        if (path / TASK_FILE).is_file():
            yield path
        elif depth > 1:
            yield from _walk(path, depth - 1)


def _deduplicate(folder: Path, paths: Iterable[Path]) -> dict[str, Path]:
    """Return each task once, by id: if links counted as tasks, both splits could contain the same task."""
    real = folder.resolve()
    names = {path: path.relative_to(folder) for path in paths}
    links_last = sorted(names, key=lambda path: (path.resolve() != real / names[path], len(path.parts), path))
    tasks = dict[Path, Path]()
    for path in links_last:
        tasks.setdefault(path.resolve(), path)
    return {names[path].as_posix(): path for path in tasks.values()}


def _list_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _matches(task_id: str, glob: str) -> bool:
    return fnmatchcase(task_id, glob) or fnmatchcase(task_id.rpartition("/")[2], glob)


def _matches_any(task_id: str, globs: Sequence[str]) -> bool:
    return any(_matches(task_id, glob) for glob in globs)


def _suggest_ids(glob: str, task_ids: Sequence[str]) -> str:
    names = [task_id.rpartition("/")[2] for task_id in task_ids]
    near = difflib.get_close_matches(glob.strip("*"), [*task_ids, *names], n=3, cutoff=0.5)
    if near:
        return f" Similar: {', '.join(dict.fromkeys(near))}"
    more = ", …" if len(task_ids) > _IDS_SHOWN else ""
    return f" The {len(task_ids)} tasks: {', '.join(list(task_ids)[:_IDS_SHOWN])}{more}"
