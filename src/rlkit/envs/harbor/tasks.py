"""Finding task folders, and choosing among them.

Invariant: whether a task is in the training or in the evaluation half depends on its own id alone, or on a list of
names, so that the two never share one, whatever else is chosen, added or shuffled.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from rlkit._util.seeds import derive_seed
from rlkit.errors import UsageError

TASK_FILE = "task.toml"
OLD_TASK_FILE = "task.yaml"
"""Of terminal-bench 1."""

EVAL_FRACTION = 0.2
"""Of the tasks, where a half is asked for and nothing says how large."""

_DEEPEST = 3
"""Folders between the one that is given and a task's own: datasets, and collections of them."""

_SHOWN = 5

type Split = Literal["all", "train", "eval"]


@dataclass(frozen=True)
class Selection:
    """A selection of tasks.

    Args:
        task_ids: globs of the tasks, each for whole ids or for their last parts; empty for all.
        exclude: globs of tasks that are left out.
        split: `eval` for the tasks kept for evaluation, `train` for the rest.
        eval_fraction: about this share of the tasks is kept, by a hash of their ids; None for a fifth.
        eval_tasks: globs of the tasks that are kept, in the place of a share.
        max_tasks: the most tasks, after shuffling; None for all.
        shuffle: whether `seed` decides the order; otherwise ids do.
    """

    task_ids: Sequence[str] = ()
    exclude: Sequence[str] = ()
    split: Split = "all"
    eval_fraction: float | None = None
    eval_tasks: Sequence[str] = ()
    max_tasks: int | None = None
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split == "all" and (self.eval_fraction is not None or self.eval_tasks):
            name = "eval_tasks" if self.eval_tasks else "eval_fraction"
            raise UsageError(f"{name} has no effect on all tasks: set split to train or eval, or leave it out")
        if self.eval_tasks and self.eval_fraction is not None:
            raise UsageError("eval_fraction has no effect beside eval_tasks: leave one of them out")

    def of(self, ids: Sequence[str]) -> list[str]:
        """The ids that are chosen, in the order in which they are to be played.

        Raises:
            UsageError: there is nothing to choose from, nothing is chosen, or a glob matches nothing.
        """
        if not ids:
            raise UsageError("there is no task to choose from: the dataset has none")
        for field, globs in (("task_ids", self.task_ids), ("exclude", self.exclude), ("eval_tasks", self.eval_tasks)):
            for glob in globs:
                if not any(_matches(one, glob) for one in ids):
                    raise UsageError(f"{field}: no task matches {glob!r}.{_near(glob, ids)}")
        named = [one for one in ids if not self.task_ids or _any(one, self.task_ids)]
        kept = [one for one in named if not _any(one, self.exclude)]
        if not kept:
            raise UsageError(f"exclude: it leaves out all of the {len(named)} tasks that are chosen")
        chosen = sorted(one for one in kept if self.split == "all" or (self.split == "eval") == self._held_out(one))
        if not chosen:
            mend = "" if self.eval_tasks else ": change eval_fraction, or name the tasks with eval_tasks"
            raise UsageError(f"split: none of the {len(kept)} tasks that are chosen is in the {self.split} half{mend}")
        if self.shuffle:
            chosen.sort(key=lambda one: derive_seed(self.seed, "harbor", "order", one))
        return chosen[: self.max_tasks]

    def _held_out(self, task_id: str) -> bool:
        if self.eval_tasks:
            return _any(task_id, self.eval_tasks)
        fraction = EVAL_FRACTION if self.eval_fraction is None else self.eval_fraction
        return derive_seed(0, "harbor", "split", task_id) < fraction * 2**31


def find_tasks(folder: Path, *, field: str = "tasks_dir") -> dict[str, Path]:
    """The folders of tasks in `folder`, by id: the path from there, or the name of `folder` where it is a task itself.

    Raises:
        UsageError: there is none.
    """
    folder = folder.expanduser().absolute()
    if not folder.is_dir():
        near = difflib.get_close_matches(folder.name, _names(folder.parent), n=1)
        hint = f" Did you mean {str(folder.with_name(near[0]))!r}?" if near else ""
        raise UsageError(f"{field}: there is no folder {folder}.{hint}")
    if (folder / TASK_FILE).is_file():
        return {folder.name: folder}
    found = _each_once(folder, _walk(folder, _DEEPEST))
    if not found:
        if old := [path for path in (folder, *_folders(folder)) if (path / OLD_TASK_FILE).is_file()]:
            raise UsageError(
                f"{field}: {old[0]} is a task of terminal-bench 1: "
                f"run `rlkit tasks convert {folder} --to DIR`, and use that folder"
            )
        raise UsageError(f"{field}: no folder in {folder} holds a {TASK_FILE}")
    return found


def require_readable(found: Mapping[str, Path], *, field: str = "tasks_dir") -> None:
    """Have Harbor read the tasks, so that a broken one is known before a run begins.

    Raises:
        UsageError: one cannot be read.
    """
    for name, path in found.items():
        if (why := find_task_fault(path)) is not None:
            raise UsageError(
                f"{field}: the task {name} cannot be read: {why.rstrip('.')}. Mend it, or leave it out with exclude"
            )


def find_task_fault(path: Path) -> str | None:
    """In one line, why Harbor cannot read a task, or what of it says nothing; None where it can be played."""
    from harbor.models.task.task import Task

    from rlkit.envs.harbor.verification.sealing import TestedWork

    try:
        task = Task(path)
        TestedWork.of(task.config.metadata)
        texts = {"instruction.md": task.instruction}
        if steps := task.config.steps:
            texts = {f"steps/{step.name}/instruction.md": task.step_instruction(step.name) for step in steps}
    except Exception as error:  # of many kinds, all of which say what is wrong with the task's files
        return " ".join(f"{type(error).__name__}: {error}".split())
    return next((f"{name} is empty" for name, text in texts.items() if not text.strip()), None)


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    for path in _folders(folder):
        if (path / TASK_FILE).is_file():
            yield path
        elif depth > 1:
            yield from _walk(path, depth - 1)


def _each_once(folder: Path, paths: Iterable[Path]) -> dict[str, Path]:
    """By id: a task that links lead to, too, would otherwise be several, of which each half could have one."""
    real = folder.resolve()
    names = {path: path.relative_to(folder) for path in paths}
    own_first = sorted(names, key=lambda path: (path.resolve() != real / names[path], len(path.parts), path))
    found = dict[Path, Path]()
    for path in own_first:
        found.setdefault(path.resolve(), path)
    return {names[path].as_posix(): path for path in found.values()}


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _matches(task_id: str, glob: str) -> bool:
    return fnmatchcase(task_id, glob) or fnmatchcase(task_id.rpartition("/")[2], glob)


def _any(task_id: str, globs: Sequence[str]) -> bool:
    return any(_matches(task_id, glob) for glob in globs)


def _near(glob: str, ids: Sequence[str]) -> str:
    names = [one.rpartition("/")[2] for one in ids]
    near = difflib.get_close_matches(glob.strip("*"), [*ids, *names], n=3, cutoff=0.5)
    if near:
        return f" Near it: {', '.join(dict.fromkeys(near))}"
    more = ", …" if len(ids) > _SHOWN else ""
    return f" The {len(ids)} tasks: {', '.join(list(ids)[:_SHOWN])}{more}"
